"""Runs scenario files of packing: all their jobs together, then a report of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenaryd.scenarios.jobs import Job, run_all
from catenaryd.scenarios.packing import fleet, live_moves, over_time, serving, targets
from catenaryd.scenarios.packing.live_schema import LiveMoves
from catenaryd.scenarios.packing.schema import (
    Fleet,
    OverTime,
    Scenario,
    Serving,
    Targets,
    load_scenario,
)
from catenaryd.scenarios.packing.settings import PackingJob
from catenaryd.scenarios.report import Report
from services.errors import InvalidInput

DOCUMENT = "kv-packing.md"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Named:
    """A scenario and the name of its file."""

    name: str
    scenario: Scenario


def run_scenarios(
    paths: Sequence[Path],
    *,
    quick: bool = False,
    workers: int = 0,
    live: bool = False,
    progress: Progress = lambda _line: None,
) -> list[Report]:
    """Returns a report of each scenario.

    Args:
        paths: YAML files.
        quick: The short forms.
        workers: Simulations at a time; 0: one per CPU.
        live: Real processes may be started, which scenarios of kind live need.
        progress: Told what is done, line by line.

    Raises:
        InvalidInput: If a file is not a scenario, or its data is not there; before anything is
            run.
    """
    named = [Named(_name(path), load_scenario(path, quick=quick)) for path in paths]
    for each in named:
        if isinstance(each.scenario, LiveMoves) and not live:
            raise InvalidInput(f"{each.name}.kind", "live needs real processes: give --live")
    jobs = [job for each in named for job in _jobs(each.scenario)]
    for job in dict.fromkeys(jobs):
        if job.data is not None:
            job.sessions()  # a trace that is too short is found before anything runs

    def count(done: int, of: int) -> None:
        progress(f"{done} of {of} simulations")

    results = run_all(jobs, workers or os.cpu_count() or 1, count)
    return [_report(each, results, progress) for each in named]


def _name(path: Path) -> str:
    return "scenario" if str(path) == "-" else path.stem


def _jobs(scenario: Scenario) -> list[PackingJob]:
    match scenario:
        case Fleet():
            return list(fleet.jobs(scenario))
        case OverTime():
            return list(over_time.jobs(scenario))
        case Serving():
            return list(serving.jobs(scenario))
        case Targets():
            return list(targets.jobs(scenario))
        case LiveMoves():
            return []  # it is served when its turn comes, by processes that have the machine


def _report(named: Named, results: Mapping[Job[Any], Any], progress: Progress) -> Report:
    name, scenario = named.name, named.scenario
    match scenario:
        case Fleet():
            return fleet.report(name, scenario, results)
        case OverTime():
            return over_time.report(name, scenario, results)
        case Serving():
            return serving.report(name, scenario, results)
        case Targets():
            return targets.report(name, scenario, results)
        case LiveMoves():
            return live_moves.serve(name, scenario, progress)
