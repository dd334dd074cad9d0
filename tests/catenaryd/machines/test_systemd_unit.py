"""Units for systemd: words arrive as they were given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenaryd.machines.systemd_unit import STOP_S, quoted, unit_for


def words_of(line: str) -> list[str]:
    """Reads the words of an `ExecStart` back, as systemd.syntax(7) and systemd.service(5) say."""
    words, inside, escaped = [""], False, False
    for each in line.replace("%%", "%").replace("$$", "$"):
        if escaped or (inside and each not in '"\\'):
            words[-1] += each
            escaped = False
        elif each == "\\":
            escaped = True
        elif each == '"':
            inside = not inside
        else:
            words.append("")
    return words


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" ")), min_size=1))
def test_words_of_a_command_arrive_as_they_were_given(words: list[str]) -> None:
    assert words_of(" ".join(map(quoted, words))) == words


def test_a_line_break_cannot_begin_another_line_of_the_unit() -> None:
    with pytest.raises(InvalidInput):
        quoted("a\nExecStart=/bin/sh")


def test_units_of_a_user_and_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = unit_for("catenary-join", "agents", ["join", "--foreground"], system=False)
    own.write()
    assert own.file == tmp_path / "systemd" / "user" / "catenary-join.service"
    assert own.file.read_text() == own.text
    assert "WantedBy=default.target" in own.text
    assert own.enable.startswith("systemctl --user daemon-reload")
    system = unit_for("catenary-join", "agents", ["join"], system=True)
    assert system.file == Path("/etc/systemd/system/catenary-join.service")
    assert "WantedBy=multi-user.target" in system.text


def test_systemd_waits_for_the_drain() -> None:
    from catenaryd.machines.joined_agents import DRAIN_S

    assert DRAIN_S < STOP_S
    assert f"TimeoutStopSec={STOP_S}" in unit_for("a", "b", [], system=True).text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = unit_for("catenary-join", "agents, 100 %", ["join", "--name", "a b"], system=True)
    file = tmp_path / "catenary-join.service"
    file.write_text(unit.text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert "catenary-join.service" not in done.stderr
