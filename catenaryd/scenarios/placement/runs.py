"""Runs scenario files of placement: all their jobs together, then a report of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenaryd.scenarios.jobs import Job, run_all
from catenaryd.scenarios.placement import by_load, fewest, live_steps, scaling
from catenaryd.scenarios.placement.live_schema import LiveSteps
from catenaryd.scenarios.placement.schema import (
    Attainment,
    Demand,
    Fewest,
    Overhead,
    Scaling,
    Scenario,
    load_scenario,
)
from catenaryd.scenarios.report import Report
from services.errors import InvalidInput

DOCUMENT = "slo-placement.md"
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
        if isinstance(each.scenario, LiveSteps) and not live:
            raise InvalidInput(f"{each.name}.kind", "live needs real processes: give --live")
    jobs = [job for each in named for job in _jobs(each.scenario)]

    def count(done: int, of: int) -> None:
        progress(f"{done} of {of} simulations")

    results = run_all(jobs, workers or os.cpu_count() or 1, count)
    return [_report(each, results, progress) for each in named]


def _name(path: Path) -> str:
    return "scenario" if str(path) == "-" else path.stem


def _jobs(scenario: Scenario) -> list[Job[Any]]:
    match scenario:
        case Fewest():
            return list(fewest.jobs(scenario))
        case Attainment() | Demand() | Overhead():
            return list(by_load.jobs(scenario))
        case Scaling():
            return list(scaling.jobs(scenario))
        case LiveSteps():
            return []  # it is served when its turn comes, by processes that have the machine


def _report(named: Named, results: Mapping[Job[Any], Any], progress: Progress) -> Report:
    name, scenario = named.name, named.scenario
    match scenario:
        case Fewest():
            return fewest.report(name, scenario, results)
        case Attainment() | Demand() | Overhead():
            return by_load.report(name, scenario, results)
        case Scaling():
            return scaling.report(name, scenario, results)
        case LiveSteps():
            return live_steps.serve(name, scenario, progress)
