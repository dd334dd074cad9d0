"""Units for systemd, which start `catenaryd up` or `catenaryd join` with the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catenary_services.errors import InvalidInput

STOP_S = 90
"""Seconds that systemd waits for the drain; agents are ended after fewer."""
_TEXT = """\
[Unit]
Description={description}
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
WorkingDirectory={folder}
ExecStart={command}
KillMode=mixed
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=5
NoNewPrivileges=yes

[Install]
WantedBy={target}
"""


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """A unit: its file, its text, and the command that starts it."""

    file: Path
    text: str
    enable: str

    def write(self) -> None:
        """Writes the file.

        Raises:
            InvalidInput: The folder cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.text, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(
                "install", f"{self.file} cannot be written: {error.strerror}"
            ) from error


def unit_for(name: str, description: str, arguments: Sequence[str], *, system: bool) -> SystemdUnit:
    """Returns the unit that runs `catenaryd ARGUMENTS` in the present folder.

    Args:
        name: Name of the unit, without ".service".
        description: One line for people.
        arguments: Arguments of `catenaryd`; whatever they name is seen from the present folder.
        system: Whether it is a unit of the system, and not of this user.
    """
    words = [sys.executable, "-m", "catenaryd", *arguments]
    text = _TEXT.format(
        description=_escaped(description),
        folder=_escaped(str(Path.cwd())),
        command=" ".join(map(quoted, words)),
        stop_s=STOP_S,
        target="multi-user.target" if system else "default.target",
    )
    if system:
        folder, control = Path("/etc/systemd/system"), "systemctl"
    else:
        folder, control = _user_folder() / "systemd" / "user", "systemctl --user"
    enable = f"{control} daemon-reload && {control} enable --now {name}.service"
    return SystemdUnit(folder / f"{name}.service", text, enable)


def quoted(word: str) -> str:
    """Returns a word of a command as `ExecStart` reads it back.

    Raises:
        InvalidInput: It holds a line break or another control character.
    """
    if not word.isprintable():
        raise InvalidInput("install", f"{word!r} cannot stand in a unit")
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _user_folder() -> Path:
    known = os.environ.get("XDG_CONFIG_HOME")  # systemd's own variable, no setting of ours
    return Path(known) if known else Path.home() / ".config"
