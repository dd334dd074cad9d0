"""Scenario files of server chains: typed, closed, with a JSON schema.

A scenario is a YAML mapping; `kind` says which of the classes below it is. Unknown keys are errors.
`quick` replaces keys for the short form that CI runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from catenary_lab.scenarios.chains.schema_parts import (
    Closed,
    CommunicationSpec,
    Count,
    FixedServer,
    GpuSpec,
    LiveSpec,
    Load,
    ModelSpec,
    PolicyName,
    Positive,
    RandomServers,
    System,
    WorkloadSpec,
)
from catenary_lab.scenarios.yaml_files import read_mapping
from catenary_services.errors import InvalidInput


class _Scenario(Closed):
    title: str = Field(min_length=1, description="One line, for the report.")
    figure: str = Field("", description="Figure or table of the paper it reproduces.")
    model: ModelSpec
    gpus: dict[str, GpuSpec] = Field(min_length=1, description="Kinds of GPUs by name.")
    servers: RandomServers | list[FixedServer] = Field(description="Who serves.")
    communication: CommunicationSpec = Field(
        default_factory=lambda: CommunicationSpec.model_validate({}), description="tau_c."
    )
    expected: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="Reference values by row and column of the table, to set beside.",
    )
    notes: list[str] = Field(default_factory=list, description="Sentences below the tables.")
    quick: dict[str, Any] = Field(
        default_factory=dict, description="Keys to replace in the short form."
    )

    @model_validator(mode="after")
    def _known_gpus(self) -> _Scenario:
        servers = self.servers
        if isinstance(servers, RandomServers):
            named = [servers.big, servers.small]
        else:
            named = [server.gpu for server in servers]
            if not named:
                raise ValueError("servers: there must be one at least")
            if len({server.name for server in servers}) < len(servers):
                raise ValueError("servers: two have the same name")
        for gpu in named:
            if gpu not in self.gpus:
                raise ValueError(f"servers: no kind of GPU is called {gpu!r}")
        return self


class Serve(_Scenario):
    """Response times of whole systems (Fig. 8, Table 1)."""

    kind: Literal["serve"]
    systems: list[System] = Field(min_length=1, description="What is compared.")
    workloads: list[WorkloadSpec] = Field(min_length=1, description="One case each.")
    seeds: list[int] = Field([1], min_length=1, description="One run each, on fixed servers.")
    live: LiveSpec | None = Field(
        None, description="With --live: serve the same on real processes, too (systems of ours)."
    )


class Policies(_Scenario):
    """Response times of policies over one set of chains and a range of loads (Fig. 5)."""

    kind: Literal["policies"]
    policies: list[PolicyName] = Field(min_length=1, description="What is compared.")
    c: Count = Field(7, description="Of the chains.")
    loads: list[Load] = Field(min_length=1, description="Shares of the chains' total rate.")
    requests: Count = Field(description="Of one run.")


class Tuning(_Scenario):
    """What c is best, and what c each measure chooses (Fig. 6, 7)."""

    kind: Literal["tuning"]
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads.")
    curve_rate_per_s: Positive = Field(description="Load of which the whole curve is drawn.")
    stop: Literal["rate", "all"] = Field("all", description="As of a system.")
    target_load: Load = Field(0.7, description="rho_bar.")
    requests: Count = Field(description="Of one run.")


class Placement(_Scenario):
    """c K(c) of GBP-CR beside that of random placements (Fig. 3)."""

    kind: Literal["placement"]
    c: Count = Field(7, description="Sessions at a time per chain.")
    target_load: Load = Field(0.7, description="rho_bar.")
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads; one case each.")
    placements: Count = Field(100, description="Random ones per topology.")


class Allocation(_Scenario):
    """Job servers that GCA needs for a rate, beside bounds and an integer program (Fig. 4)."""

    kind: Literal["allocation"]
    c: Count = Field(7, description="Of the placement.")
    loads: list[Load] = Field(
        min_length=1, description="lambda as shares of the chains' total rate."
    )
    target_load: Load = Field(0.7, description="rho_bar; lambda / rho_bar is the rate needed.")


Scenario = Annotated[
    Serve | Policies | Tuning | Placement | Allocation, Field(discriminator="kind")
]
KINDS = ("serve", "policies", "tuning", "placement", "allocation")
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


def parse_scenario(document: object, where: str = "scenario", *, quick: bool = False) -> Scenario:
    """Returns the scenario a document describes; see `load_scenario`.

    Args:
        document: A mapping, as YAML or JSON gives it.
        where: Named in errors.
        quick: The short form.
    """
    if not isinstance(document, Mapping):
        raise InvalidInput(where, "must be a mapping of a scenario's keys")
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
        # pydantic's path begins with the kind and names classes of unions; the file's does not.
        path = [str(part) for part in first["loc"][1:] if not str(part)[:1].isupper()]
        path = [part for part in path if not part.startswith(("list[", "literal["))]
        text = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(".".join([where, *path]), text) from None
