"""Published numbers to compare ours with: the paper's, and those measured with its artifact."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from catenary_lab.scenarios.pools.schema import Policy
from catenary_lab.scenarios.report import mean

CLUSTERS = ("HC1-L", "HC2-L", "HC3-L", "HC4-L")

PAPER_OVER_NP = {
    "poisson": dict(zip(CLUSTERS, (64.9, 34.8, 46.7, 45.5), strict=True)),
    "bursty": dict(zip(CLUSTERS, (161.6, 34.1, 50.4, 54.1), strict=True)),
}
"""Load beyond that of NP, in per cent, of section 7.2."""
PAPER_OVER_DART = {
    "poisson": dict(zip(CLUSTERS, (47.2, 17.3, 34.8, 29.3), strict=True)),
    "bursty": dict(zip(CLUSTERS, (50.4, 18.1, 40.2, 34.5), strict=True)),
}
PAPER_LOW_CLASS_UTILISATION = {"NP": 0.081, "DART-r": 0.295, "PPipe": 0.736}
"""Utilisation of the low class of GPUs, Figure 8 in section 7.2."""
PAPER_PLANNER_SECONDS = {2: 3.5, 3: 35.3, 4: 77.0}
"""Seconds of planning by number of GPU classes, sections 7.2 and 7.6."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A load factor of `reference_load_factors.csv`, late finishes counted."""

    set_name: str
    group: str
    cluster: str
    scheduler: str
    model: str
    load_factor: float


def scheduler_of(policy: Policy) -> str | None:
    """Returns the artifact's name of a policy's equivalent; None if there is none."""
    if policy.dispatch == "reactive":
        return "reactive" if policy.planner == "reference" else None
    return {"reference": "v4", "np": "bl", "dart-r": "dart-r"}.get(policy.planner)


def read_measured(dataset: Path) -> list[Measured]:
    """Returns what was measured with the artifact's simulator; empty if the file is missing."""
    path = dataset / "reference_load_factors.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Measured(
                row["set"],
                row["group"],
                row["cluster"],
                row["scheduler"],
                row["dnn"],
                float(row["lf_mean"]),
            )
            for row in csv.DictReader(file)
            if row["lf_mean"]
        ]


def measured_mean(
    measured: list[Measured], scheduler: str, cluster: str, models: set[tuple[str, str]]
) -> float | None:
    """Returns the mean over (set, model) pairs on a cluster; None if one was not measured."""
    found = {
        (each.set_name, each.model): each.load_factor
        for each in measured
        if each.scheduler == scheduler and each.cluster == cluster
    }
    if not models or not models <= found.keys():
        return None
    return mean([found[key] for key in sorted(models)])
