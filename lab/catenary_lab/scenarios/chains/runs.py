"""Runs scenario files of server chains: all their jobs together, then a report of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.chains import (
    allocation,
    live_chains,
    placement,
    policies,
    serve,
    tuning,
)
from catenary_lab.scenarios.chains.schema import (
    Allocation,
    Placement,
    Policies,
    Scenario,
    Serve,
    Tuning,
    load_scenario,
)
from catenary_lab.scenarios.named import Named, Progress, load_all, run_jobs
from catenary_lab.scenarios.pools.jobs import Job
from catenary_lab.scenarios.report import Report
from catenary_services.errors import InvalidInput

DOCUMENT = "server-chains.md"


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
        live: Serve on real processes, too, what has a `live` section.
        progress: Told what is done, line by line.

    Raises:
        InvalidInput: If a file is not a scenario, or none can be served live; before anything is
            run.
    """
    named = load_all(paths, load_scenario, quick=quick)
    if live and not any(live_chains.is_live(each.scenario) for each in named):
        raise InvalidInput("live", "none of these scenarios has a `live` section")
    jobs = [job for each in named for job in _jobs(each.scenario)]
    results = run_jobs(jobs, workers, progress)
    reports = [_report(each, results) for each in named]
    if not live:
        return reports
    return [
        live_chains.with_live(each.scenario, results, report, progress)
        for each, report in zip(named, reports, strict=True)
    ]


def _jobs(scenario: Scenario) -> list[Job[Any]]:
    match scenario:
        case Serve():
            return list(serve.jobs(scenario))
        case Policies():
            return list(policies.jobs(scenario))
        case Tuning():
            return list(tuning.jobs(scenario))
        case Placement():
            return list(placement.jobs(scenario))
        case Allocation():
            return list(allocation.jobs(scenario))


def _report(named: Named[Scenario], results: Mapping[Job[Any], Any]) -> Report:
    name, scenario = named.name, named.scenario
    match scenario:
        case Serve():
            return serve.report(name, scenario, results)
        case Policies():
            return policies.report(name, scenario, results)
        case Tuning():
            return tuning.report(name, scenario, results)
        case Placement():
            return placement.report(name, scenario, results)
        case Allocation():
            return allocation.report(name, scenario, results)
