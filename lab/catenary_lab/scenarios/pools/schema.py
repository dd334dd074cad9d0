"""Scenario files of pooled pipelines: what to plan, what to serve, what to compare."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from catenary_lab.scenarios.schema import (
    Closed,
    Count,
    Positive,
    Scenario,
    ScenarioFiles,
    Share,
)
from catenary_services.errors import InvalidInput


class Policy(Closed):
    """A curve of the report: its planner and its dispatcher."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    planner: Literal["catenary", "reference", "np", "dart-r", "alpaserve"] = Field(
        "catenary", description="Whose plan; `reference` is the one of the paper's artifact."
    )
    dispatch: Literal["reservation", "reactive"] = Field(
        "reservation", description="Book every resource ahead, or choose at every stage anew."
    )
    max_partitions: Count | None = Field(
        None, description="Longest pipeline of our planner; empty: 3, as in the data set's best."
    )
    margin: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Share of the SLO our planner keeps free, at most the instance's own;"
        " empty: the planner's choice.",
    )
    shared: bool = Field(
        False, description="Whether models have routes through the pools of others, too."
    )
    seeds: list[int] | None = Field(
        None, min_length=1, description="Its runs, if it is not to have those of all."
    )


class _Planned(Scenario):
    dataset: str = Field(
        "ppipe",
        description="Folder in the format of tests/data/ppipe; looked up below CATENARY_DATA, then "
        "tests/data.",
    )


class _Served(_Planned):
    """A scenario that serves requests of the data set's instances."""

    instances: list[str] = Field(min_length=1, description="Instance ids; * matches any part.")
    policies: list[Policy] = Field(min_length=1, description="What is compared.")
    arrivals: list[str] = Field(
        ["poisson"],
        min_length=1,
        description="poisson, gamma:CV, onoff:ON_S:OFF_S or a trace file.",
    )
    base_rps: Literal["reference", "own"] = Field(
        "reference",
        description="Load factor 1: the reference's rate of each model, or weight x objective of "
        "the plan served.",
    )
    duration_s: Positive = Field(30.0, description="Length of a run.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    noise: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Coefficient of variation of compute and transfer times."
    )


class LoadFactors(_Served):
    """The largest load factor at which enough requests are answered in time (Fig. 6, 10)."""

    kind: Literal["load_factors"]
    target: Share = Field(0.99, description="Share of requests to answer within their SLO.")
    highest: Positive = Field(1.0, description="Where the search begins, going down.")
    step: Positive = Field(0.05, description="Step of the search.")


class Utilisation(LoadFactors):
    """Utilisation of the GPUs of each class at those load factors (Fig. 8)."""

    kind: Literal["utilisation"]  # type: ignore[assignment]


class Attainment(_Served):
    """SLO attainment over the load (Fig. 7)."""

    kind: Literal["attainment"]
    load_factors: list[Positive] = Field(min_length=1, description="Loads to serve.")


class Sensitivity(_Planned):
    """Load factors of single models on a small cluster while one thing changes (Fig. 13)."""

    kind: Literal["sensitivity"]
    vary: Literal["slo_scale", "gpu_ratio", "margin"] = Field(
        description="SLO as a multiple of the latency on the fastest GPU; GPUs per class as "
        '"4:12"; share of the SLO the planner keeps free.'
    )
    values: list[float | str] = Field(min_length=1, description="Values of what varies.")
    cluster: str = Field("HC1-L", description="Classes, levels and links are this cluster's.")
    gpus: list[Count] = Field([4, 12], description="GPUs of each class, the fastest first.")
    models: list[str] = Field(["*"], description="Names of models; * matches any part.")
    slo_scale: Positive = Field(5.0, description="Where it is not varied.")
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(0.4, description="Where it is not varied.")
    duration_s: Positive = Field(20.0, description="Length of a run.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    target: Share = Field(0.99, description="Share of requests to answer within their SLO.")
    step: Positive = Field(0.05, description="Step of the search for the load factor.")


class PlannerScaling(_Planned):
    """Durations of planning as clusters grow (Fig. 14)."""

    kind: Literal["planner_scaling"]
    instance: str = Field(description="Whose models, weights and SLOs.")
    models: list[Count] = Field(
        [],
        description="Numbers of models, of the data set's profiles; none: the instance's models.",
    )
    gpus: list[Count] = Field(min_length=1, description="Sizes of the cluster.")
    classes: list[list[str]] = Field(
        min_length=1, description="GPU classes of the cluster, the scarcest first."
    )
    first_share: Share = Field(0.25, description="Share of the first class; the rest is split.")
    server_gbps: Positive = Field(6.0, description="Effective rate of a server's link.")
    max_partitions: Count = Field(3, description="Longest pipeline.")


class Live(_Planned):
    """The same plan and arrivals in the simulator and on real processes."""

    kind: Literal["live"]
    instance: str = Field(description="Models, weights and SLOs are this instance's.")
    models: list[str] = Field(["*"], description="Which of its models.")
    together: bool = Field(
        False, description="Serve all models at once; else each alone on the whole cluster."
    )
    gpus: dict[str, Count] = Field(description="GPUs of each class; an agent process each.")
    dilation: Positive = Field(description="Every time is so many times as long.")
    duration_s: Positive = Field(30.0, description="Length of a run, on the wall clock.")
    warm_up_s: Positive = Field(5.0, description="Load before the first run, to open all links.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    target: Share = Field(0.99, description="Share of requests to answer within their SLO.")
    step: Positive = Field(0.05, description="Step of the search for the load factor.")
    highest: Positive = Field(1.2, description="No load factor above this is tried.")
    reply_allowance_ms: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Part of the SLO (not dilated) kept for the way back to the client."
    )
    runs: Count = Field(6, description="Most live runs of each seed.")


class LivePlans(Scenario):
    """A cluster's own plan for unlike devices beside plans by hand; only with --live."""

    kind: Literal["live_plans"]
    model: str = Field("efficientnet-lite0", description="A demo model that is asked for rows.")
    gpus: dict[str, Count] = Field(
        min_length=2,
        description="GPUs of each class, emulated from their data sheets; an agent process each.",
    )
    slowdown: Positive = Field(description="They are so many times slower than that.")
    slo_ms: Positive = Field(description="Of the requests, on the wall clock.")
    max_batch: Count = Field(16, description="Most rows of a batch, in plans by hand as well.")
    at_once: Count = Field(description="The load: so many requests are always under way.")
    warm_up_s: Positive = Field(10.0, description="Load before the first plan is measured.")
    settle_s: Positive = Field(3.0, description="Load under a plan before it is measured.")
    screening_s: Positive = Field(6.0, description="Every plan by hand is measured for so long.")
    finalists: Count = Field(2, description="So many of the best of them are measured again.")
    rounds: Count = Field(2, description="Times that they and the cluster's own plan take turns.")
    measured_s: Positive = Field(20.0, description="Length of each of these turns.")


OfDataset = LoadFactors | Utilisation | Attainment | Sensitivity | PlannerScaling | Live
PoolsScenario = OfDataset | LivePlans
FILES: ScenarioFiles[PoolsScenario] = ScenarioFiles(
    Annotated[PoolsScenario, Field(discriminator="kind")]
)


def matching(patterns: list[str], names: list[str], where: str) -> list[str]:
    """Returns the names that match any of the patterns, in the names' order.

    Raises:
        InvalidInput: If a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidInput(where, f"nothing is called {pattern!r}")
    return [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
