"""Scenario files of packing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.packing.schema_parts import (
    GpuSpec,
    LimitSpec,
    MeasureName,
    PolicySpec,
    WorkloadSpec,
)
from catenary_lab.scenarios.schema import (
    Annotatable,
    Count,
    NotNegative,
    Positive,
    ScenarioFiles,
)


class _Simulated(Annotatable):
    gpus: dict[str, GpuSpec] = Field(min_length=1, description="Kinds of GPUs by name; cases.")
    workloads: list[WorkloadSpec] = Field(min_length=1, description="Cases, one after the other.")
    policies: list[PolicySpec] = Field(min_length=1, description="What is compared.")
    seeds: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1, description="A run each.")
    warm_up_s: NotNegative = Field(200.0, description="From an empty cluster; not measured.")
    duration_s: Positive = Field(800.0, description="Measured, after the warm-up.")
    epoch_s: Positive = Field(1.0, description="Time between decisions.")
    expected: dict[str, dict[str, dict[str, str]]] = Field(
        default_factory=dict,
        description="Reference values by measure, row (GPU and workload) and column (policy).",
    )

    @model_validator(mode="after")
    def _labels_differ(self) -> _Simulated:
        for name, labels in (
            ("policies", [each.label for each in self.policies]),
            ("workloads", [each.label for each in self.workloads]),
        ):
            if len(set(labels)) < len(labels):
                raise ValueError(f"{name}: two have the same label")
        return self


class Fleet(_Simulated):
    """GPUs, utilisation and moves where a GPU is started whenever none has room (Fig. 11-14)."""

    kind: Literal["fleet"]
    measures: list[MeasureName] = Field(
        ["gpus_mean", "gpus_peak", "utilisation", "migrations_per_s"],
        min_length=1,
        description="A table for each.",
    )


class OverTime(_Simulated):
    """Active GPUs epoch by epoch, of the first seed (Fig. 15)."""

    kind: Literal["over_time"]


class Serving(_Simulated):
    """Requests that a fixed number of GPUs serves, and those that give up (Fig. 6)."""

    kind: Literal["serving"]
    most_gpus: dict[str, Count] = Field(description="How many there are of each of `gpus`.")
    patience_s: Positive = Field(10.0, description="Requests that wait longer give up.")

    @model_validator(mode="after")
    def _all_counted(self) -> Serving:
        if self.most_gpus.keys() != self.gpus.keys():
            raise ValueError("most_gpus: say how many there are of each of `gpus`, and no others")
        return self


class Targets(_Simulated):
    """Limits that a policy has to keep beside others; the report says of each whether it does."""

    kind: Literal["targets"]
    policy: str = Field(description="Label of the policy that has to reach it.")
    limits: list[LimitSpec] = Field(min_length=1, description="What has to be reached.")

    @model_validator(mode="after")
    def _known_labels(self) -> Targets:
        policies = {each.label for each in self.policies}
        workloads = {each.label for each in self.workloads}
        for label in (self.policy, *(each.beside for each in self.limits)):
            if label not in policies:
                raise ValueError(f"policies: none is called {label!r}")
        for limit in self.limits:
            for label in limit.workloads:
                if label not in workloads:
                    raise ValueError(f"workloads: none is called {label!r}")
        return self


Simulated = Fleet | OverTime | Serving | Targets
FILES: ScenarioFiles[Simulated | LiveMoves] = ScenarioFiles(
    Annotated[Simulated | LiveMoves, Field(discriminator="kind")]
)
