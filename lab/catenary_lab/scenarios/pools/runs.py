"""Runs scenario files: all their jobs together, then a report of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.pools import (
    attainment,
    live_report,
    load_factors,
    planner_scaling,
    sensitivity,
)
from catenary_lab.scenarios.pools.context import Context, context_of
from catenary_lab.scenarios.pools.jobs import Job, run_all
from catenary_lab.scenarios.pools.schema import (
    Attainment,
    Live,
    LoadFactors,
    PlannerScaling,
    Scenario,
    Sensitivity,
    Utilisation,
    load_scenario,
)
from catenary_lab.scenarios.report import Report
from catenary_services.errors import InvalidInput

DOCUMENT = "pooled-pipelines.md"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Form:
    """How scenarios are run."""

    quick: bool = False
    live: bool = False
    """Scenarios that can are run on real processes; without it they are left out."""
    workers: int = 0
    """Processes of the simulator; 0: one per CPU."""


@dataclass(frozen=True, slots=True)
class Named:
    """A scenario and where it comes from."""

    name: str
    scenario: Scenario
    context: Context


def load_all(paths: Sequence[Path], *, quick: bool) -> list[Named]:
    """Returns the scenarios of the files; raises InvalidInput before anything is run."""
    found = []
    for path in paths:
        scenario = load_scenario(path, quick=quick)
        found.append(Named(path.stem, scenario, context_of(scenario.dataset)))
    return found


def run_scenarios(
    paths: Sequence[Path], form: Form, progress: Progress = lambda _line: None
) -> list[Report]:
    """Returns a report of each scenario.

    Args:
        paths: YAML files.
        form: How.
        progress: Told what is done, line by line.

    Raises:
        InvalidInput: If a file is not a scenario, or is one for real processes and `form` is not.
    """
    named = load_all(paths, quick=form.quick)
    for each in named:
        if isinstance(each.scenario, Live) and not form.live:
            raise InvalidInput(each.name, "runs on real processes: ask for it with --live")
    # Times of planning and of real processes are measured: nothing else may run beside them.
    alone = [each for each in named if isinstance(each.scenario, PlannerScaling)]
    workers = form.workers or os.cpu_count() or 1
    jobs = [job for each in named if each not in alone for job in _jobs(each)]
    results = run_all(jobs, workers, _counter(progress)) if jobs else {}
    for each in alone:
        progress(f"planning for {each.name}")
        results.update(run_all(_jobs(each), 1))
    return [_report(each, results, progress) for each in named]


def _jobs(named: Named) -> list[Job[Any]]:
    scenario, context = named.scenario, named.context
    match scenario:
        case LoadFactors():  # and Utilisation, which looks at the same runs
            return list(load_factors.jobs(scenario, context))
        case Attainment():
            return list(attainment.jobs(scenario, context))
        case Sensitivity():
            return list(sensitivity.jobs(scenario, context))
        case PlannerScaling():
            return list(planner_scaling.jobs(scenario, context))
        case Live():
            return []


def _report(named: Named, results: Mapping[Job[Any], Any], progress: Progress) -> Report:
    name, scenario, context = named.name, named.scenario, named.context
    match scenario:
        case Utilisation():
            return load_factors.utilisation_report(name, scenario, context, results)
        case LoadFactors():
            return load_factors.report(name, scenario, context, results)
        case Attainment():
            return attainment.report(name, scenario, context, results)
        case Sensitivity():
            return sensitivity.report(name, scenario, context, results)
        case PlannerScaling():
            return planner_scaling.report(name, scenario, context, results)
        case Live():
            return live_report.report(
                name, scenario, live_report.run_live(scenario, context, progress)
            )


def _counter(progress: Progress) -> Callable[[int, int], None]:
    def count(done: int, of: int) -> None:
        progress(f"{done} of {of} simulations")

    return count
