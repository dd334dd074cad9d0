"""Runs scenario files of packing: all their jobs together, then a report of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.named import Named, Progress, load_all, refuse_live, run_jobs
from catenary_lab.scenarios.packing import fleet, live_moves, over_time, serving, targets
from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.packing.schema import (
    Fleet,
    OverTime,
    Scenario,
    Serving,
    Targets,
    load_scenario,
)
from catenary_lab.scenarios.packing.settings import PackingJob
from catenary_lab.scenarios.pools.jobs import Job
from catenary_lab.scenarios.report import Report

DOCUMENT = "kv-packing.md"


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
        refuse_live(named, LiveMoves)
    jobs = [job for each in named for job in _jobs(each.scenario)]
    for job in dict.fromkeys(jobs):
        if job.data is not None:
            job.sessions()  # a trace that is too short is found before anything runs
    results = run_jobs(jobs, workers, progress)
    return [_report(each, results, progress) for each in named]


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


def _report(named: Named[Scenario], results: Mapping[Job[Any], Any], progress: Progress) -> Report:
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
