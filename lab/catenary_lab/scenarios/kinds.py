"""Kinds of scenario files as plug-ins, with all that the runner needs to run them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from catenary_lab.scenarios.report import Findings
from catenary_lab.scenarios.schema import Scenario, ScenarioFiles

ResultT_co = TypeVar("ResultT_co", covariant=True)
Progress = Callable[[str], None]


class Job(Hashable, Protocol, Generic[ResultT_co]):
    """A run: a case and a seed. It is complete in itself, so that equal runs are done once."""

    def run(self) -> ResultT_co:
        """Returns the result of the run."""
        ...


Results = Mapping[Job[Any], Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """The way in which the scenarios of one class are simulated.

    Attributes:
        scenario: The class.
        jobs: Returns the runs of a scenario; raises InvalidInput if its data is not there.
        report: Returns the findings from the results of these runs.
        alone: Whether times are measured, so that nothing may run beside these jobs.
        with_live: Returns the findings of real processes for a scenario that has been simulated, to
            be set beside; a scenario asks for that by a section `live`. None: there are none.
    """

    scenario: type[Any]
    jobs: Callable[[Any], Iterable[Job[Any]]]
    report: Callable[[Any, Results], Findings]
    alone: bool = False
    with_live: Callable[[Any, Results, Progress], Findings] | None = None


@dataclass(frozen=True, slots=True)
class LiveExperiment:
    """The way in which scenarios that need real processes are run.

    Attributes:
        scenario: The class of the scenarios.
        serve: Returns the findings of the processes for a scenario.
    """

    scenario: type[Any]
    serve: Callable[[Any, Progress], Findings]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scenario files.

    Attributes:
        name: Name of the kind in `catenaryd simulate`.
        files: Reads the files.
        experiments: Experiments by the values of `kind`.
    """

    name: str
    files: ScenarioFiles[Any]
    experiments: tuple[Experiment | LiveExperiment, ...]

    def experiment(self, scenario: Scenario) -> Experiment | LiveExperiment:
        """Returns the experiment of a scenario's class."""
        return next(each for each in self.experiments if each.scenario is type(scenario))


def kind_named(name: str) -> Kind:
    """Returns a kind by its name, and imports its code, which is not done before."""
    kind: Kind = import_module(f"catenary_lab.scenarios.{name}.kind").KIND
    return kind
