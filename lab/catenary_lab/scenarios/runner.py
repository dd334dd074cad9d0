"""Runs scenario files of any kind: all their jobs together, then a report of each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from catenary_lab.scenarios.figures import compiled
from catenary_lab.scenarios.kinds import (
    Experiment,
    Job,
    Kind,
    LiveExperiment,
    Progress,
    Results,
    kind_named,
)
from catenary_lab.scenarios.report import Report, report_of
from catenary_lab.scenarios.schema import Scenario
from catenary_services.errors import InvalidInput
from catenaryd.local.supervisor import end_with_parent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Named:
    """A scenario with the name of its file and its experiment."""

    name: str
    scenario: Scenario
    experiment: Experiment | LiveExperiment

    @property
    def has_live(self) -> bool:
        """True if real processes serve the scenario, too, when they may be started."""
        experiment = self.experiment
        asked = isinstance(experiment, Experiment) and experiment.with_live is not None
        return asked and getattr(self.scenario, "live", None) is not None


def run_scenarios(
    kind: Kind | str,
    paths: Sequence[Path],
    *,
    quick: bool = False,
    workers: int = 0,
    live: bool = False,
    progress: Progress = lambda _line: None,
) -> list[Report]:
    """Returns a report of each scenario.

    Args:
        kind: Kind of the files, or its name.
        paths: YAML files; `-` is the standard input.
        quick: Whether to run the short forms.
        workers: Number of simultaneous simulations; 0: one per CPU.
        live: Whether real processes may be started: for scenarios that need them, and beside the
            simulation of those that have a `live` section.
        progress: Told line by line what is done.

    Raises:
        InvalidInput: A file is not a scenario, its data is not there, or `live` does not fit;
            nothing has been run then.
    """
    if isinstance(kind, str):
        kind = kind_named(kind)
    named = [_load(kind, path, quick=quick) for path in paths]
    _check_live(kind, named, live=live)
    together: list[Job[Any]] = []
    alone: list[Job[Any]] = []
    for each in named:
        experiment = each.experiment
        # Live scenarios are served in turn, so that each has the machine to itself.
        if isinstance(experiment, Experiment):
            (alone if experiment.alone else together).extend(experiment.jobs(each.scenario))
    results = run_all(together, workers, progress) | run_all(alone, 1, progress)
    return [_report(each, results, progress, live=live) for each in named]


def run_all(
    jobs: Iterable[Job[T]], workers: int = 0, progress: Progress = lambda _line: None
) -> dict[Job[T], T]:
    """Returns every job's result; equal jobs are done once.

    Args:
        jobs: The jobs, in the order in which they begin.
        workers: Number of processes; 1: all jobs run in this one; 0: one per CPU.
        progress: Told how many of how many are done.
    """
    wanted = list(dict.fromkeys(jobs))
    results: dict[Job[T], T] = {}
    workers = workers or os.cpu_count() or 1
    if workers <= 1 or len(wanted) <= 1:
        for job in wanted:
            results[job] = job.run()
            progress(f"{len(results)} of {len(wanted)} simulations")
        return results
    # Fresh processes: a fork of a process with threads (gRPC, solvers) can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        futures: Mapping[Future[T], Job[T]] = {pool.submit(_run, job): job for job in wanted}
        try:
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                progress(f"{len(results)} of {len(wanted)} simulations")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def _run(job: Job[T]) -> T:
    return job.run()


def _load(kind: Kind, path: Path, *, quick: bool) -> _Named:
    scenario = kind.files.load(path, quick=quick)
    for each in scenario.expect:
        compiled(each)
    name = "scenario" if str(path) == "-" else path.stem
    return _Named(name, scenario, kind.experiment(scenario))


def _check_live(kind: Kind, named: Sequence[_Named], *, live: bool) -> None:
    needy = [each for each in named if isinstance(each.experiment, LiveExperiment)]
    if needy and not live:
        raise InvalidInput(f"{needy[0].name}.kind", "live needs real processes: give --live")
    beside = any(isinstance(e, Experiment) and e.with_live is not None for e in kind.experiments)
    if live and beside and not any(each.has_live for each in named):
        raise InvalidInput("live", "none of these scenarios has a `live` section")


def _report(named: _Named, results: Results, progress: Progress, *, live: bool) -> Report:
    experiment, scenario = named.experiment, named.scenario
    if isinstance(experiment, LiveExperiment):
        return report_of(named.name, scenario, experiment.serve(scenario, progress))
    report = report_of(named.name, scenario, experiment.report(scenario, results))
    if not (live and named.has_live and experiment.with_live is not None):
        return report
    return report.beside(experiment.with_live(scenario, results, progress))
