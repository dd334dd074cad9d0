"""Scenario files of placement under objectives: typed, closed, with a JSON schema.

A scenario is a YAML mapping; `kind` says which of the classes below it is. Unknown keys are errors.
`quick` replaces keys for the short form that CI runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from catenary_lab.scenarios.chains.schema_parts import Closed, Count, NotNegative, Positive, Share
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.placement.schema_parts import (
    ClusterSpec,
    EngineSpec,
    LengthsSpec,
    NewsSpec,
    ObjectivesSpec,
    PolicySpec,
    WorkerSpec,
)
from catenary_lab.scenarios.yaml_files import read_mapping
from catenary_services.errors import InvalidInput


class _Scenario(Closed):
    title: str = Field(min_length=1, description="One line, for the report.")
    figure: str = Field("", description="Figure of the paper it reproduces.")
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
        default_factory=lambda: NewsSpec.model_validate({}), description="How long news take."
    )
    expected: dict[str, dict[str, float | str]] = Field(
        default_factory=dict,
        description="Reference values by row and column of the table, to set beside.",
    )
    notes: list[str] = Field(default_factory=list, description="Sentences below the tables.")
    quick: dict[str, Any] = Field(
        default_factory=dict, description="Keys to replace in the short form."
    )

    @model_validator(mode="after")
    def _known_workers(self) -> _Scenario:
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


class Fewest(_Scenario):
    """The smallest number of workers that reaches an attainment (Fig. 11, 12)."""

    kind: Literal["fewest"]
    target: Share = Field(0.99, description="Share of the requests that must meet both objectives.")
    most_workers: Count = Field(120, description="Where the search gives up.")


class Attainment(_Scenario):
    """Attainment and P99 ATGT of fixed clusters over a range of loads (Fig. 9, 10)."""

    kind: Literal["attainment"]
    gpus: Count = Field(4, description="Of the cluster; each kind of worker takes what it says.")


class Demand(_Scenario):
    """Workers that Algorithm 1 opens when it may open as many as it likes."""

    kind: Literal["demand"]
    most_workers: Count = Field(120, description="Workers there are.")


class Overhead(_Scenario):
    """How long decisions take over a range of loads (Fig. 13)."""

    kind: Literal["overhead"]
    workers_per_rps: Positive = Field(description="Workers of a run, per request and second.")


class Scaling(_Scenario):
    """Workers that are started and stopped by the scheduler's own scaling, with cold starts."""

    kind: Literal["scaling"]
    clusters: list[ClusterSpec] = Field(min_length=1, description="How they scale; one case each.")
    steps: list[NotNegative] = Field(
        [1.0], min_length=1, description="The rate over time, in equal parts, as factors."
    )
    workers_per_rps: Positive = Field(description="k5 of eq. 7, as learned from `fewest`.")
    workers_base: NotNegative = Field(0.0, description="c5 of eq. 7.")
    most_workers: Count = Field(120, description="Workers that may be started.")


Simulated = Fewest | Attainment | Demand | Overhead | Scaling
Scenario = Annotated[Simulated | LiveSteps, Field(discriminator="kind")]
KINDS = ("fewest", "attainment", "demand", "overhead", "scaling", "live")
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
