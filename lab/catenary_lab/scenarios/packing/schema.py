"""Scenario files of packing: typed, closed, with a JSON schema.

A scenario is a YAML mapping; `kind` says which of the classes below it is. Unknown keys are errors.
`quick` replaces keys for the short form that CI runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from catenary_lab.scenarios.chains.schema_parts import Closed, Count, NotNegative, Positive
from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.packing.schema_parts import (
    GpuSpec,
    LimitSpec,
    MeasureName,
    PolicySpec,
    WorkloadSpec,
)
from catenary_lab.scenarios.yaml_files import read_mapping
from catenary_services.errors import InvalidInput


class _Scenario(Closed):
    title: str = Field(min_length=1, description="One line, for the report.")
    figure: str = Field("", description="Figure of the paper it reproduces.")
    gpus: dict[str, GpuSpec] = Field(min_length=1, description="Kinds of GPUs by name; cases.")
    workloads: list[WorkloadSpec] = Field(min_length=1, description="Cases, one after the other.")
    policies: list[PolicySpec] = Field(min_length=1, description="What is compared.")
    seeds: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1, description="A run each.")
    warm_up_s: NotNegative = Field(200.0, description="From an empty cluster; not measured.")
    duration_s: Positive = Field(800.0, description="Measured, after the warm-up.")
    epoch_s: Positive = Field(1.0, description="Between decisions.")
    expected: dict[str, dict[str, dict[str, str]]] = Field(
        default_factory=dict,
        description="Reference values by measure, row (GPU and workload) and column (policy).",
    )
    notes: list[str] = Field(default_factory=list, description="Sentences below the tables.")
    quick: dict[str, Any] = Field(
        default_factory=dict, description="Keys to replace in the short form."
    )

    @model_validator(mode="after")
    def _labels_differ(self) -> _Scenario:
        for name, labels in (
            ("policies", [each.label for each in self.policies]),
            ("workloads", [each.label for each in self.workloads]),
        ):
            if len(set(labels)) < len(labels):
                raise ValueError(f"{name}: two have the same label")
        return self


class Fleet(_Scenario):
    """GPUs, utilisation and moves where a GPU is started whenever none has room (Fig. 11-14)."""

    kind: Literal["fleet"]
    measures: list[MeasureName] = Field(
        ["gpus_mean", "gpus_peak", "utilisation", "migrations_per_s"],
        min_length=1,
        description="A table for each.",
    )


class OverTime(_Scenario):
    """Active GPUs epoch by epoch, of the first seed (Fig. 15)."""

    kind: Literal["over_time"]


class Serving(_Scenario):
    """Who can be served on a fixed number of GPUs (Fig. 6)."""

    kind: Literal["serving"]
    most_gpus: dict[str, Count] = Field(description="How many there are of each of `gpus`.")
    patience_s: Positive = Field(10.0, description="Requests that wait longer give up.")

    @model_validator(mode="after")
    def _all_counted(self) -> Serving:
        if self.most_gpus.keys() != self.gpus.keys():
            raise ValueError("most_gpus: say how many there are of each of `gpus`, and no others")
        return self


class Targets(_Scenario):
    """What a policy has to reach beside others; the report says of each whether it does."""

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
Scenario = Annotated[Simulated | LiveMoves, Field(discriminator="kind")]
KINDS = ("fleet", "over_time", "serving", "targets", "live")
_ADAPTER: TypeAdapter[Scenario] = TypeAdapter(Scenario)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of scenario files."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_ADAPTER.json_schema()}


def load_scenario(path: Path, *, quick: bool = False) -> Scenario:
    """Returns the scenario of a YAML file; `-` is the standard input.

    Raises:
        InvalidInput: If it is none; names the key that is missing, unknown or wrong.
    """
    return parse_scenario(read_mapping(path), path.name, quick=quick)


def parse_scenario(
    document: Mapping[Any, Any], where: str = "scenario", *, quick: bool = False
) -> Scenario:
    """Returns the scenario a document describes; see `load_scenario`.

    Args:
        document: A mapping, as YAML or JSON gives it.
        where: Named in errors.
        quick: The short form.
    """
    scenario = _validated(document, where)
    if quick and scenario.quick:
        scenario = _validated({**document, **scenario.quick}, f"{where}.quick")
    return scenario


def _validated(document: Mapping[Any, Any], where: str) -> Scenario:
    kind = document.get("kind")
    if kind not in KINDS:
        missing = "is missing" if kind is None else f"{kind!r} is none of {', '.join(KINDS)}"
        raise InvalidInput(f"{where}.kind", missing)
    try:
        return _ADAPTER.validate_python(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        # pydantic's path begins with the kind.
        path = [str(part) for part in first["loc"][1:]]
        text = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(".".join([where, *path]), text) from None
