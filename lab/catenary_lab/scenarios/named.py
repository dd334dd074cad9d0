"""Scenario files by their names, and the jobs of all of them together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from catenary_lab.scenarios.pools.jobs import Job, run_all
from catenary_services.errors import InvalidInput

Progress = Callable[[str], None]
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Named(Generic[S]):
    """A scenario and the name of its file."""

    name: str
    scenario: S


class Load(Protocol[S_co]):
    """Reads a scenario file of one kind."""

    def __call__(self, path: Path, *, quick: bool) -> S_co:
        """Returns what a file says, or its short form."""
        ...


def load_all(paths: Sequence[Path], load: Load[S], *, quick: bool) -> list[Named[S]]:
    """Returns the scenarios of files; `-` is the standard input.

    Raises:
        InvalidInput: If a file is not a scenario.
    """
    return [
        Named("scenario" if str(path) == "-" else path.stem, load(path, quick=quick))
        for path in paths
    ]


def refuse_live(named: Iterable[Named[Any]], live_kind: type[Any]) -> None:
    """Raises InvalidInput if a scenario needs real processes, which were not asked for."""
    for each in named:
        if isinstance(each.scenario, live_kind):
            raise InvalidInput(f"{each.name}.kind", "live needs real processes: give --live")


def run_jobs(jobs: Sequence[Job[Any]], workers: int, progress: Progress) -> Mapping[Job[Any], Any]:
    """Returns the result of every job, each run once; 0 workers: one per CPU."""

    def count(done: int, of: int) -> None:
        progress(f"{done} of {of} simulations")

    return run_all(jobs, workers or os.cpu_count() or 1, count)
