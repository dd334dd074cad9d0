"""Runs scenario files of placement: all their jobs together, then a report of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.named import Named, Progress, load_all, refuse_live, run_jobs
from catenary_lab.scenarios.placement import by_load, fewest, live_steps, scaling
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.placement.schema import (
    Attainment,
    Demand,
    Fewest,
    Overhead,
    Scaling,
    Scenario,
    load_scenario,
)
from catenary_lab.scenarios.pools.jobs import Job
from catenary_lab.scenarios.report import Report

DOCUMENT = "slo-placement.md"


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
    named = load_all(paths, load_scenario, quick=quick)
    if not live:
        refuse_live(named, LiveSteps)
    jobs = [job for each in named for job in _jobs(each.scenario)]
    results = run_jobs(jobs, workers, progress)
    return [_report(each, results, progress) for each in named]


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


def _report(named: Named[Scenario], results: Mapping[Job[Any], Any], progress: Progress) -> Report:
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
