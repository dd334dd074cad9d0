"""How stages are run: limits, what is kept of one that is killed, what comes out at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import call, wheels
from benchmarks.gpu.program import (
    FAILED,
    LATE,
    MISSED,
    NOT_RUN,
    OK,
    SKIPPED,
    Runner,
    Stage,
    read_rows,
    table,
    verdict,
)
from benchmarks.gpu.stage import Context, Row

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}

STAGES = """
import subprocess, sys, time
from benchmarks.gpu.program import Stage, main
from benchmarks.gpu.stage import Skipped

def good(here):
    here.row("speed", 5.0, "1/s", at_least=1)
    here.row("name", "card")

def bad(here):
    here.row("distance", 0.5, at_most=0.1)

def broken(here):
    here.row("before", 1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def endless(here):
    here.row("before", 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here.folder / "child").write_text(str(child.pid))
    time.sleep(600)

def skipped(here):
    raise Skipped("nothing to run it with")

def crashing(here):
    import ctypes
    ctypes.string_at(0)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of the test's own, as `benchmarks.gpu.<name>` are."""
    names = ("good", "bad", "broken", "endless", "skipped", "crashing")
    stages = ", ".join(f"Stage('{name}', 30, '__main__:{name}', '')" for name in names)
    text = f"{STAGES}\nif __name__ == '__main__':\n    main('probe', [{stages}])\n"
    (tmp_path / "probe.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


def run(program: Path, *names: str, limits: dict[str, float] | None = None, whole: float = 300):
    """Runs stages of the test's program through the real runner."""
    (program / "out").mkdir(exist_ok=True)
    runner = Runner("probe", program / "out", program, tiny=True)
    runner._module = "probe"
    stages = [Stage(name, (limits or {}).get(name, 60.0), f"__main__:{name}", "") for name in names]
    return runner.run(stages, whole)


def test_each_stage_ends_in_its_own_way_and_the_next_one_runs(program: Path) -> None:
    outcomes = run(program, "broken", "crashing", "skipped", "bad", "good")
    verdicts = [each.verdict for each in outcomes]
    assert verdicts == [FAILED, FAILED, SKIPPED, MISSED, OK]
    broken, crashed, skipped, bad, good = outcomes
    assert "illegal memory access" in broken.why
    assert [row.name for row in broken.rows] == ["before"]
    assert "exit -11" in crashed.why
    assert skipped.why == "skipped: nothing to run it with"
    assert bad.why == "distance"
    assert [(row.name, row.value, row.ok) for row in good.rows] == [
        ("speed", 5.0, True),
        ("name", "card", None),
    ]
    document = json.loads((program / "out/probe.json").read_text())
    assert [each["verdict"] for each in document["stages"]] == verdicts
    assert document["stages"][4]["rows"][0] == {
        "name": "speed",
        "value": 5.0,
        "unit": "1/s",
        "bound": ">= 1",
        "ok": True,
    }
    log = (program / "out/probe.log").read_text()
    assert "==== broken" in log
    assert "Segmentation fault" in log
    text = table(outcomes)
    assert text.splitlines()[-1].startswith("good         ok")


def test_a_stage_that_hangs_is_killed_with_all_it_started_and_keeps_its_rows(
    program: Path,
) -> None:
    began = time.monotonic()
    hung, after = run(program, "endless", "good", limits={"endless": 1.2})
    assert (hung.verdict, after.verdict) == (LATE, OK)
    assert [row.name for row in hung.rows] == ["before"]
    assert time.monotonic() - began < 100
    child = int((program / "child").read_text())
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)
    assert "in endless" in (program / "out/probe.log").read_text()  # where it was, shortly before


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_with_no_time_left_stages_are_named_as_not_run(program: Path) -> None:
    (outcome,) = run(program, "good", whole=1.0)
    assert (outcome.verdict, outcome.rows) == (NOT_RUN, ())


def test_a_program_exits_with_1_if_anything_went_wrong(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "probe", "--tiny", "--only", "nothing"],
        cwd=program,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "unknown: nothing" in done.stderr


def test_a_row_that_was_being_written_costs_no_other(tmp_path: Path) -> None:
    here = Context(tmp_path, tiny=True, rows_file=tmp_path / "rows")
    here.row("whole", 1.0, "s", at_most=2, note="as promised")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"name": "cut o')
    assert read_rows(tmp_path / "rows") == (Row("whole", 1.0, "s", "<= 2", True, "as promised"),)
    assert read_rows(tmp_path / "nothing") == ()


def test_a_number_that_is_none_is_never_kept(tmp_path: Path) -> None:
    here = Context(tmp_path, tiny=True)
    here.row("distance", float("nan"), at_most=1)
    here.row("share", float("nan"), at_least=0)
    assert [row.ok for row in here.rows] == [False, False]
    assert verdict(0, tuple(here.rows), late=False, log="", seconds=1.0)[0] == MISSED


# What the machine has: PyTorch, transformers and what these bring, and a few more.
THERE = {
    "aiohttp",
    "click",
    "filelock",
    "fsspec",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "pygments",
    "pytest",
    "pyyaml",
    "rich",
    "shellingham",
    "tokenizers",
    "torch",
    "typer",
    "typing-extensions",
}


def test_whatever_the_platform_needs_travels_or_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {*project["dependencies"], *project["optional-dependencies"]["platform"]}
    travels = {canonicalize_name(each.partition("==")[0]) for each in wheels.wanted()}
    left, known = [Requirement(each) for each in needed], set()
    while left:
        each = left.pop()
        name = canonicalize_name(each.name)
        if name in known | THERE or (each.marker and not each.marker.evaluate(MACHINE)):
            continue
        known.add(name)
        assert name in travels, f"{name} neither travels nor is there"
        of_extras = [MACHINE | {"extra": extra} for extra in each.extras]
        for line in metadata.requires(name) or ():
            inner = Requirement(line)
            if inner.marker is None or any(map(inner.marker.evaluate, [MACHINE, *of_extras])):
                inner.marker = None
                left.append(inner)


def test_wheels_have_the_versions_that_are_tested_here() -> None:
    pinned = set((ROOT / "requirements/constraints.txt").read_text().lower().splitlines())
    assert [each for each in wheels.wanted() if each.lower() not in pinned] == []


def test_a_call_runs_from_the_checkout_with_the_wheels_in_front(tmp_path: Path) -> None:
    made = call.environment(tmp_path / "site")
    first, second, *_ = made["PYTHONPATH"].split(os.pathsep)
    assert (first, second) == (str(tmp_path / "site"), str(ROOT))
    assert made["CATENARY_PURE"] == "1"
