"""The commands of `docs/machines.md`, run in order on machines that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_harness import ROOT, environment
from fault_cluster import Place

PAGE = ROOT / "docs" / "machines.md"
_BLOCK = re.compile(r"^```sh\n# (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageCommand:
    """One line of the page, and the machine it is typed on."""

    machine: str
    line: str


def commands_of(page: Path = PAGE) -> list[PageCommand]:
    """Returns the commands of a page, in order; a block names its machine in its first line."""
    found = []
    for machine, lines in _BLOCK.findall(page.read_text(encoding="utf-8")):
        found += [PageCommand(machine, line) for line in lines.splitlines() if line.strip()]
    return found


@dataclass
class TestMachine:
    """A machine with an address and a folder of its own, in which commands are typed."""

    __test__ = False
    name: str
    place: Place
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, line: str) -> list[str]:
        program, *arguments = shlex.split(line)
        assert program in ("catenary", "catenaryd"), line
        return [*self.place.prefix, sys.executable, "-m", program, *arguments]

    def _options(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Namespaces of one machine would find each other's shared memory.
        own = {"OMP_NUM_THREADS": "1", "CATENARY_TRANSPORTS": "tcp", **self.variables}
        return {"cwd": self.folder, "env": {**environment(), **own}, "text": True}

    def start(self, line: str) -> subprocess.Popen[str]:
        """Starts a command that stays."""
        options = self._options()
        with (self.folder / "err.log").open("a") as errors:
            process = subprocess.Popen(
                self.command(line), stdout=subprocess.PIPE, stderr=errors, **options
            )
        self._started.append(process)
        return process

    def run(self, line: str, *, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, whatever that is."""
        return subprocess.run(
            self.command(line),
            capture_output=True,
            check=False,
            timeout=timeout_s,
            **self._options(),
        )

    def done(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a command that must succeed."""
        done = self.run(line)
        assert done.returncode == 0, f"{self.name}: {line}\n{done.stdout}\n{done.stderr}\n" + (
            self.logs()
        )
        return done

    def do(self, line: str) -> str:
        """Runs a command that must succeed, and returns what it printed."""
        return self.done(line).stdout

    def facts(self, line: str) -> Any:
        return json.loads(self.do(f"{line} --json"))

    def end(self) -> None:
        """Ends what was started, and agents that go on in the background."""
        lock = self.folder / ".catenary" / "join.lock"
        holder = lock.read_text() if lock.exists() else ""
        if holder.isdigit():
            with_suppressed_kill(int(holder))
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)
            if process.stdout is not None:
                process.stdout.close()

    def logs(self) -> str:
        parts = []
        for file in [self.folder / "err.log", *(self.folder / ".catenary" / "logs").glob("*.log")]:
            if file.exists():
                lines = file.read_text(errors="replace").splitlines()[-15:]
                parts.append(f"== {self.name} {file.name}\n" + "\n".join(lines))
        return "\n".join(parts)


def with_suppressed_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
