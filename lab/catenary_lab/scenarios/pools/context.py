"""Finds the data of a scenario, and names its parts for reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from catenary_lab.scenarios.data import data_folder
from catenary_lab.scenarios.pools.jobs import Load, OfInstance, Plan, dataset_at
from catenary_lab.scenarios.pools.published import Measured, read_measured
from catenary_lab.scenarios.pools.schema import (
    Attainment,
    LoadFactors,
    OfDataset,
    Policy,
    matching,
)


@dataclass(frozen=True, slots=True)
class Context:
    """The data set of a scenario."""

    dataset: Path

    def instances(self, patterns: list[str]) -> list[str]:
        """Returns the ids of the instances that match a pattern."""
        return matching(patterns, list(dataset_at(self.dataset).instances), "instances")

    def cluster_of(self, instance: str) -> str:
        """Returns the name of an instance's cluster."""
        return dataset_at(self.dataset).instance(instance).cluster

    def measured(self) -> list[Measured]:
        """Returns the load factors measured with the paper's artifact."""
        return read_measured(self.dataset)


def context_of(scenario: OfDataset) -> Context:
    """Returns the data set of a scenario; raises InvalidInput if there is no such folder."""
    return Context(data_folder(scenario.dataset, "dataset"))


def plan_of(context: Context, instance: str, policy: Policy) -> Plan:
    """Returns the choice of the plan by which a policy serves an instance."""
    task = OfInstance(instance)
    return Plan(
        context.dataset, task, policy.planner, policy.max_partitions, policy.margin, policy.shared
    )


def loads_of(scenario: LoadFactors | Attainment, policy: Policy, arrivals: str) -> list[Load]:
    """Returns one load per seed of a policy."""
    return [
        Load(arrivals, scenario.base_rps, scenario.duration_s, seed, scenario.noise)
        for seed in policy.seeds or scenario.seeds
    ]


def arrivals_name(arrivals: str) -> str:
    """Returns the name of a kind of arrivals in tables."""
    kind, _, rest = arrivals.partition(":")
    names = {"poisson": "Poisson", "gamma": f"Gamma, cv {rest}", "onoff": f"on/off {rest} s"}
    return names.get(kind, Path(arrivals).stem)
