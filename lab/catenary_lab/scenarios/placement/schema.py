"""Scenario files of placement under objectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.placement.schema_parts import (
    ChatPolicySpec,
    ChatsSpec,
    ClusterSpec,
    EngineSpec,
    LengthsSpec,
    NewsSpec,
    ObjectivesSpec,
    PolicySpec,
    WorkerSpec,
)
from catenary_lab.scenarios.schema import (
    Annotatable,
    Count,
    Fraction,
    NotNegative,
    Positive,
    ScenarioFiles,
)


class _Simulated(Annotatable):
    workers: dict[str, WorkerSpec] = Field(min_length=1, description="Kinds of workers by name.")
    engines: list[EngineSpec] = Field(
        default_factory=lambda: [EngineSpec.model_validate({"label": "whole"})],
        min_length=1,
        description="How workers run prompts; one case each.",
    )
    objectives: ObjectivesSpec
    lengths: LengthsSpec
    arrivals: str = Field(
        "poisson", description="poisson, gamma:CV, onoff:ON_S:OFF_S; trace: a stretch of the file."
    )
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads; one case each.")
    duration_s: Positive = Field(60.0, description="Requests arrive so long, then all are served.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    policies: list[PolicySpec] = Field(min_length=1, description="What is compared.")
    news: NewsSpec = Field(
        default_factory=lambda: NewsSpec.model_validate({}), description="Delays of messages."
    )
    expected: dict[str, dict[str, float | str]] = Field(
        default_factory=dict,
        description="Reference values by row and column of the table, to set beside.",
    )

    @model_validator(mode="after")
    def _known_workers(self) -> _Simulated:
        for policy in self.policies:
            if policy.workers not in self.workers:
                raise ValueError(f"policies: no kind of workers is called {policy.workers!r}")
        for name, values in (
            ("policies", [policy.label for policy in self.policies]),
            ("engines", [engine.label for engine in self.engines]),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: two have the same label")
        return self


class Fewest(_Simulated):
    """The smallest number of workers that reaches an attainment (Fig. 11, 12)."""

    kind: Literal["fewest"]
    target: Fraction = Field(
        0.99, description="Share of the requests that must meet both objectives."
    )
    most_workers: Count = Field(120, description="Where the search gives up.")


class Attainment(_Simulated):
    """Attainment and P99 ATGT of fixed clusters over a range of loads (Fig. 9, 10)."""

    kind: Literal["attainment"]
    gpus: Count = Field(
        4, description="GPUs of the cluster; each kind of worker takes what it says."
    )


class Demand(_Simulated):
    """Workers that Algorithm 1 opens when it may open as many as it likes."""

    kind: Literal["demand"]
    most_workers: Count = Field(120, description="Workers there are.")


class Overhead(_Simulated):
    """Durations of decisions over a range of loads (Fig. 13)."""

    kind: Literal["overhead"]
    workers_per_rps: Positive = Field(description="Workers of a run, per request and second.")


class Scaling(_Simulated):
    """Workers that are started and stopped by the scheduler's own scaling, with cold starts."""

    kind: Literal["scaling"]
    clusters: list[ClusterSpec] = Field(min_length=1, description="How they scale; one case each.")
    steps: list[NotNegative] = Field(
        [1.0], min_length=1, description="The rate over time, in equal parts, as factors."
    )
    workers_per_rps: Positive = Field(description="k5 of eq. 7, as learned from `fewest`.")
    workers_base: NotNegative = Field(0.0, description="c5 of eq. 7.")
    most_workers: Count = Field(120, description="Workers that may be started.")


class SharedBeginnings(Annotatable):
    """Conversations that begin alike: what is not computed twice, and how even the load is."""

    kind: Literal["chats"]
    worker: WorkerSpec = Field(description="All workers.")
    workers: Count = Field(description="How many there are.")
    chunk_tokens: int = Field(512, ge=0, description="Prompt tokens beside every decode step.")
    lengths: LengthsSpec
    chats: ChatsSpec
    arrivals: str = Field("poisson", description="Of first turns: poisson or gamma:CV.")
    rates_per_s: list[Positive] = Field(min_length=1, description="Requests; one case each.")
    duration_s: Positive = Field(300.0, description="Conversations begin so long.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    policies: list[ChatPolicySpec] = Field(min_length=1, description="What is compared.")
    news: NewsSpec = Field(
        default_factory=lambda: NewsSpec.model_validate({}), description="Delays of messages."
    )


Simulated = Fewest | Attainment | Demand | Overhead | Scaling
FILES: ScenarioFiles[Simulated | SharedBeginnings | LiveSteps] = ScenarioFiles(
    Annotated[Simulated | SharedBeginnings | LiveSteps, Field(discriminator="kind")]
)
