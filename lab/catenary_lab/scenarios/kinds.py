"""Kinds of scenario files as plug-ins: what a kind has to say so that the runner can run it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from catenary_lab.scenarios.report import Findings
from catenary_lab.scenarios.schema import Scenario, ScenarioFiles

DOCUMENTS = {
    "chains": "server-chains.md",
    "packing": "kv-packing.md",
    "placement": "slo-placement.md",
    "pools": "pooled-pipelines.md",
}
"""The page of each kind's results."""

ResultT_co = TypeVar("ResultT_co", covariant=True)
Progress = Callable[[str], None]


class Job(Hashable, Protocol, Generic[ResultT_co]):
    """A run: a case and a seed. It says everything by itself, so that equal ones are done once."""

    def run(self) -> ResultT_co:
        """Returns what the run found."""
        ...


Results = Mapping[Job[Any], Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is done with the scenarios of one class.

    Attributes:
        scenario: The class.
        jobs: Returns the runs of a scenario; raises InvalidInput if its data is not there.
        report: Returns what the results of these runs come to.
        alone: Times are measured: nothing may run beside these jobs.
        with_live: Returns what real processes make of a scenario that has been simulated, to be
            set beside; the scenario says by a section `live` whether it wants that.
    """

    scenario: type[Any]
    jobs: Callable[[Any], Iterable[Job[Any]]]
    report: Callable[[Any, Results], Findings]
    alone: bool = False
    with_live: Callable[[Any, Results, Progress], Findings] | None = None


@dataclass(frozen=True, slots=True)
class LiveExperiment:
    """What is done with scenarios that need real processes.

    Attributes:
        scenario: Their class.
        serve: Returns what the processes make of a scenario.
    """

    scenario: type[Any]
    serve: Callable[[Any, Progress], Findings]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scenario files.

    Attributes:
        name: As `catenaryd simulate` has it.
        files: Reads them.
        experiments: By the values of `kind`.
    """

    name: str
    files: ScenarioFiles[Any]
    experiments: tuple[Experiment | LiveExperiment, ...]

    @property
    def document(self) -> str:
        """The page of its results."""
        return DOCUMENTS[self.name]

    def experiment(self, scenario: Scenario) -> Experiment | LiveExperiment:
        """Returns what is done with a scenario: that of its very class."""
        return next(each for each in self.experiments if each.scenario is type(scenario))


def kind_named(name: str) -> Kind:
    """Returns a kind by its name; only now is its code imported."""
    kind: Kind = import_module(f"catenary_lab.scenarios.{name}.kind").KIND
    return kind
