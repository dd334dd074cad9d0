"""Runs the stages of a program, each in a process and within a time limit of its own.

Measurements of a stage are written row by row, so that they survive if the stage is killed. The
program's JSON is written anew after every stage, so that it survives if the program is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import Context, Row, Skipped

OK, MISSED, FAILED, LATE, SKIPPED, NOT_RUN = (
    "ok",
    "missed",
    "failed",
    "out of time",
    "skipped",
    "not run",
)
BAD = (MISSED, FAILED, LATE)
_LEAST_S = 5.0
"""A stage is not begun with less time than this left."""
_DUMP_S = 2.0
"""Seconds before its limit at which a stage dumps its tracebacks."""
_TINY_FACTOR = 10
"""Factor of time limits in a dry run, which may share its CPU with other work."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One question to the machine, with a time limit for its answer."""

    name: str
    limit_s: float
    target: str
    """"module:function"; the function takes a `Context`."""
    about: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a stage: its verdict, its duration, its figures, and why it failed if it did."""

    stage: Stage
    verdict: str
    seconds: float
    rows: tuple[Row, ...] = ()
    why: str = ""


def main(program: str, stages: Sequence[Stage]) -> None:
    """Runs a program, or with `--stage` one of its stages in this process."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.gpu.{program}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU: a dry run")
    parser.add_argument("--limit", type=float, default=470.0, help="seconds for all stages")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages alone")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="folder of models, kept for further calls")
    given = parser.parse_args()
    if given.stage:
        sys.exit(run_here(_named(stages, [given.stage])[0], given))
    chosen = _named(stages, given.only) if given.only else list(stages)
    given.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = given.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(program, given.out, folder, tiny=given.tiny)
        outcomes = runner.run(chosen, given.limit)
    print(table(outcomes), flush=True)
    sys.exit(1 if any(each.verdict in BAD for each in outcomes) else 0)


def _named(stages: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    unknown = set(names) - {each.name for each in stages}
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; {', '.join(s.name for s in stages)}")
    return [each for each in stages if each.name in names]


def run_here(stage: Stage, given: argparse.Namespace) -> int:
    """Runs a stage in this process. Returns 0 if it came to its end, 3 if it has to be skipped."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, given.limit - _DUMP_S))
    here = Context(given.folder, tiny=given.tiny, rows_file=given.rows)
    module, _, function = stage.target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(here)
    except Skipped as reason:
        print(f"skipped: {reason}", flush=True)
        return 3
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


class Runner:
    """Runs stages as processes and collects their rows."""

    def __init__(self, program: str, out: Path, folder: Path, *, tiny: bool) -> None:
        self._program = program
        self._out = out
        self._folder = folder
        self._tiny = tiny
        self._module = f"benchmarks.gpu.{program}"

    def run(self, stages: Sequence[Stage], limit_s: float) -> list[Outcome]:
        """Returns the outcomes of the stages, in order, within `limit_s` seconds."""
        ends = time.monotonic() + limit_s
        outcomes: list[Outcome] = []
        log = self._out / f"{self._program}.log"
        log.unlink(missing_ok=True)
        for stage in stages:
            left_s = ends - time.monotonic()
            if left_s < _LEAST_S:
                outcomes.append(Outcome(stage, NOT_RUN, 0.0))
            else:
                limit_s = stage.limit_s * (_TINY_FACTOR if self._tiny else 1)
                outcomes.append(self._one(stage, min(limit_s, left_s), log))
            last = outcomes[-1]
            print(f"{stage.name}: {last.verdict} ({last.seconds:.1f} s) {last.why}", flush=True)
            self._write(outcomes)
        return outcomes

    def _one(self, stage: Stage, limit_s: float, log: Path) -> Outcome:
        rows_file = self._folder / f"{stage.name}.rows"
        rows_file.unlink(missing_ok=True)
        own_log = self._folder / f"{stage.name}.log"
        command = [
            sys.executable,
            "-m",
            self._module,
            "--stage",
            stage.name,
            "--rows",
            str(rows_file),
            "--folder",
            str(self._folder),
            "--limit",
            str(limit_s),
            *(["--tiny"] * self._tiny),
        ]
        began = time.monotonic()
        with own_log.open("w") as output:
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            late = False
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                late, code = True, -1
            finally:
                # This also ends processes that the stage has started and left behind.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        seconds = time.monotonic() - began
        rows = read_rows(rows_file)
        text = own_log.read_text(errors="replace")
        with log.open("a") as whole:
            whole.write(f"==== {stage.name} ({seconds:.1f} s, exit {code})\n{text}\n")
        return Outcome(stage, *verdict(code, rows, late=late, log=text, seconds=seconds))

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        document = {
            "program": self._program,
            "tiny": self._tiny,
            "stages": [
                {
                    "name": each.stage.name,
                    "about": each.stage.about,
                    "verdict": each.verdict,
                    "seconds": round(each.seconds, 2),
                    "why": each.why,
                    "rows": [row.plain() for row in each.rows],
                }
                for each in outcomes
            ],
        }
        scratch = self._out / f".{self._program}.json"
        scratch.write_text(json.dumps(document, indent=1) + "\n")
        scratch.replace(self._out / f"{self._program}.json")


def verdict(
    code: int, rows: tuple[Row, ...], *, late: bool, log: str, seconds: float
) -> tuple[str, float, tuple[Row, ...], str]:
    """Returns verdict, seconds, rows and reason of a stage that has ended."""
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-1][:200] if lines else ""
    if late:
        return LATE, seconds, rows, last
    if code == 3:
        return SKIPPED, seconds, rows, last
    if code != 0:
        return FAILED, seconds, rows, f"exit {code}: {last}"
    missed = [row.name for row in rows if row.ok is False]
    return (MISSED if missed else OK), seconds, rows, "; ".join(missed)[:200]


def read_rows(file: Path) -> tuple[Row, ...]:
    """Returns the rows that a stage has written, without the last one if it is cut off."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            document: dict[str, Any] = json.loads(line)
            rows.append(Row(**document))
    return tuple(rows)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns all measurements and the outcome of every stage as text."""
    lines = []
    for each in outcomes:
        lines += [f"  {row.text()}" for row in each.rows]
    lines.append("")
    for each in outcomes:
        lines.append(f"{each.stage.name:<12} {each.verdict:<11} {each.seconds:6.1f} s  {each.why}")
    return "\n".join(lines)
