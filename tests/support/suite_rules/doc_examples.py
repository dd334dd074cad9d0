"""Runs the examples of a document as a reader would, one after the other in one folder.

An HTML comment in front of a code block makes it an example:

    <!-- example: file NAME -->        the block is the content of a file
    <!-- example: fast -->             commands or Python that need no cluster
    <!-- example: live -->             commands or Python that need the cluster of the page
    <!-- example: live background -->  a command that prints a line when it is ready and then stays

Commands run in bash, Python as a script. What a document calls `.venv/bin/catenary` is the command of
this environment, and a cluster gets ports of its own instead of 8000, 8001 and 8003.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catenaryd.local.local_cluster import free_port
from cluster_harness import ROOT, environment

READY_TIMEOUT_S = 180.0
BLOCK_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0

_BLOCK = re.compile(
    r"^<!-- example: (?P<how>[^>]*?) -->\n+"
    r"(?:```(?P<language>\w*)[^\n]*\n(?P<fenced>.*?)^```|(?P<indented>(?:(?: {4}[^\n]*)?\n)+))",
    re.M | re.S,
)


@dataclass(frozen=True, slots=True)
class Example:
    """One code block that is executed."""

    kind: str
    """"file", "fast" or "live"."""
    language: str
    code: str
    line: int
    file: str = ""
    background: bool = False


def examples(document: Path) -> list[Example]:
    """Returns the examples of a document, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        kind, *words = block["how"].split()
        assert kind in ("file", "fast", "live"), f"{document.name}: {block['how']!r}"
        code = block["fenced"] or textwrap.dedent(block["indented"] or "")
        found.append(
            Example(
                kind,
                block["language"] or "bash",
                code,
                text.count("\n", 0, block.start()) + 1,
                words[0] if kind == "file" else "",
                "background" in words,
            )
        )
    marks = text.count("<!-- example:")
    assert marks == len(found), f"{document.name}: {marks - len(found)} marks without a block"
    return found


def documents() -> list[Path]:
    """Returns every document that has examples."""
    candidates = [ROOT / "README.md", ROOT / "client" / "README.md", *ROOT.glob("docs/**/*.md")]
    return sorted(path for path in candidates if "<!-- example:" in path.read_text())


def simple_commands(code: str) -> Iterator[list[str]]:
    """Yields the commands of a block that a shell would only have to split into words."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


@dataclass
class DocumentRun:
    """The examples of one document in one folder."""

    folder: Path
    ports: dict[str, int] = field(
        default_factory=lambda: {name: free_port() for name in ("8000", "8001", "8003")}
    )
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, besides the usual ones."""
    background: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, chosen: Sequence[Example]) -> None:
        """Runs examples in order; what stays in the background is stopped in `close`."""
        for example in chosen:
            if example.kind == "file":
                (self.folder / example.file).write_text(example.code)
            elif example.background:
                self._start(example)
            else:
                self._run(example)

    def _run(self, example: Example) -> None:
        done = subprocess.run(
            self._command(example),
            cwd=self.folder,
            env=self._environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        print(f"--- line {example.line}\n{done.stdout}")
        assert done.returncode == 0, f"line {example.line} ended with {done.returncode}"

    def _start(self, example: Example) -> None:
        errors = (self.folder / "background.log").open("a")
        process = subprocess.Popen(
            self._command(example),
            cwd=self.folder,
            env=self._environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        self.background.append(process)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not (line := process.stdout.readline()):
            said = (self.folder / "background.log").read_text()
            assert process.poll() is None, f"line {example.line} ended: {said}"
            assert time.monotonic() < deadline, f"line {example.line} was never ready: {said}"
            time.sleep(0.1)
        print(f"--- line {example.line}\n{line}")

    def close(self) -> None:
        """Stops what runs in the background as Ctrl-C does."""
        for process in self.background:
            os.killpg(process.pid, signal.SIGINT)
        for process in self.background:
            try:
                assert process.wait(STOP_TIMEOUT_S) == 0
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def _command(self, example: Example) -> list[str]:
        code = example.code.replace(".venv/bin/", "")
        for usual, own in self.ports.items():
            code = re.sub(rf"(127\.0\.0\.1|localhost):{usual}\b", rf"\1:{own}", code)
        if example.language == "python":
            return [sys.executable, "-c", code]
        own_ports = (
            f" --grpc-port {self.ports['8001']} --http-port {self.ports['8000']}"
            f" --admin-port {self.ports['8003']}"
        )
        code = re.sub(r"(\bcatenaryd\b[^\n]*?\bup\b)", rf"\1{own_ports}", code)
        if example.background:
            code = f"exec {code.strip()}"
        return ["bash", "-euo", "pipefail", "-c", code]

    def _environment(self) -> dict[str, str]:
        clean = environment()
        return {
            **clean,
            **self.variables,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]]),
            "CATENARY_TARGET": f"127.0.0.1:{self.ports['8001']}",
            "CATENARY_ADMIN_TARGET": f"127.0.0.1:{self.ports['8003']}",
        }
