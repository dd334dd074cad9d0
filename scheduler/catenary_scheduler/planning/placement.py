"""Placements, the part of a plan that a person or a planner decides, without any measured times.

A placement as a document (YAML or JSON)::

    models:
      - name: efficientnet_lite0
        version: "1"              # optional
        slo_ms: 200               # optional
        float16_boundaries: true  # optional
        pipelines:
          - batch: 4
            partitions:
              - {blocks: [0, 4], agents: [agent-0]}
              - {blocks: [4, 10], agents: [agent-1, agent-2]}
          - batch: 4
            shared: true            # optional: the agents are another model's
            partitions:
              - {blocks: [0, 10], agents: [agent-3]}

A model that generates text has chains instead of pipelines, see `chain_placement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from catenary_scheduler.planning.chain_placement import (
    ChainPlacement,
    HostPlacement,
    chain_documents,
    chains_of_document,
    host_documents,
)
from catenary_scheduler.planning.document_fields import (
    blocks_of,
    fields_of,
    integer_of,
    items_of,
    slo_of,
    text_of,
)
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, AgentId, ModelKey, Nanoseconds
from catenary_services.domain.latency import OBJECTIVE_KEYS, TokenObjectives
from catenary_services.domain.packing import PackingGoal, packing_goal
from catenary_services.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Blocks `[first_block, last_block)` that every agent of a pool hosts."""

    first_block: int
    last_block: int
    agents: tuple[AgentId, ...]


@dataclass(frozen=True, slots=True)
class PipelinePlacement:
    """A sequence of stages, and the batch size to aim for."""

    batch_size: int
    stages: tuple[StagePlacement, ...]
    is_shared: bool = False
    """True if its pools are those of another model, which has the first use of them."""


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """The pipelines of one model, or the chains of a model that generates text."""

    model: ModelKey
    slo_ns: Nanoseconds
    float16_boundaries: bool
    pipelines: tuple[PipelinePlacement, ...]
    chains: tuple[ChainPlacement, ...] = ()
    hosts: tuple[HostPlacement, ...] = ()
    """Hosts of the chains, one per agent and range of blocks; empty without chains."""
    session_tokens: int = 0
    """Largest number of tokens of one session; 0 for a model without chains."""
    objectives: TokenObjectives | None = None
    """Objectives of sessions that name none of their own; used only with chains."""
    packing: PackingGoal = "off"
    """Goal for which sessions are moved; used only with chains."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of every model of a cluster."""

    models: tuple[ModelPlacement, ...]


@dataclass(frozen=True, slots=True)
class PlacementDefaults:
    """Values for fields that a document leaves out. `by_name` has those of models that differ."""

    version: str = "1"
    slo_ns: Nanoseconds = 1_000 * NANOSECONDS_PER_MILLISECOND
    float16_boundaries: bool = True
    session_tokens: int = 2048
    objectives: TokenObjectives | None = None
    packing: PackingGoal = "off"
    by_name: Mapping[str, PlacementDefaults] = field(default_factory=dict)

    def of(self, name: str) -> PlacementDefaults:
        return self.by_name.get(name, self)


def parse_placement(
    document: Mapping[str, object], defaults: PlacementDefaults | None = None
) -> Placement:
    """Returns the placement that a document describes.

    Raises:
        InvalidInput: A field is missing, unknown or of the wrong kind; `field` names it, e.g.
            "models[0].pipelines[0].batch".
    """
    root = fields_of(document, "", required=("models",), optional=())
    defaults = defaults or PlacementDefaults()
    models = tuple(
        _model(entry, f"models[{i}]", defaults) for i, entry in items_of(root["models"], "models")
    )
    seen: set[ModelKey] = set()
    for i, model in enumerate(models):
        if model.model in seen:
            raise InvalidInput(f"models[{i}].name", f"{model.model} is listed twice")
        seen.add(model.model)
    return Placement(models)


def placement_document(placement: Placement) -> dict[str, object]:
    """Returns a document that `parse_placement` reads back as an equal placement."""
    return {"models": [_model_document(model) for model in placement.models]}


def _model_document(model: ModelPlacement) -> dict[str, object]:
    document: dict[str, object] = {
        "name": model.model.name,
        "version": model.model.version,
        "slo_ms": _milliseconds(model.slo_ns),
        "float16_boundaries": model.float16_boundaries,
    }
    if model.chains:
        document["session_tokens"] = model.session_tokens
        if model.objectives is not None:
            named = model.objectives.named().items()
            document.update((name, _milliseconds(slo_ns)) for name, slo_ns in named)
        document["packing"] = model.packing
        document["chains"] = chain_documents(model.chains)
        document["hosts"] = host_documents(model.hosts)
        return document
    document["pipelines"] = [
        {
            "batch": pipeline.batch_size,
            **({"shared": True} if pipeline.is_shared else {}),
            "partitions": [
                {"blocks": [stage.first_block, stage.last_block], "agents": list(stage.agents)}
                for stage in pipeline.stages
            ],
        }
        for pipeline in model.pipelines
    ]
    return document


def _objectives(
    fields: Mapping[str, object], path: str, default: TokenObjectives | None
) -> TokenObjectives | None:
    if not any(name in fields for name in OBJECTIVE_KEYS):
        return default
    return TokenObjectives(
        *(
            slo_of(fields[name], f"{path}.{name}") if name in fields else 0
            for name in OBJECTIVE_KEYS
        )
    )


def _milliseconds(duration: Nanoseconds) -> int | float:
    whole, rest = divmod(duration, NANOSECONDS_PER_MILLISECOND)
    return duration / NANOSECONDS_PER_MILLISECOND if rest else whole


def _model(entry: object, path: str, defaults: PlacementDefaults) -> ModelPlacement:
    optional = ["version", "slo_ms", "float16_boundaries"]
    has_chains = isinstance(entry, Mapping) and "chains" in entry
    if has_chains:
        optional += ["session_tokens", "hosts", "packing", *OBJECTIVE_KEYS]
    served_by = "chains" if has_chains else "pipelines"
    fields = fields_of(entry, path, required=("name", served_by), optional=optional)
    name = text_of(fields["name"], f"{path}.name")
    own = defaults.of(name)
    version = own.version
    if "version" in fields:
        given = fields["version"]
        is_number = isinstance(given, int) and not isinstance(given, bool)
        version = text_of(str(given) if is_number else given, f"{path}.version")
    slo_ns = own.slo_ns
    if "slo_ms" in fields:
        slo_ns = slo_of(fields["slo_ms"], f"{path}.slo_ms")
    float16 = fields.get("float16_boundaries", own.float16_boundaries)
    if not isinstance(float16, bool):
        raise InvalidInput(f"{path}.float16_boundaries", "must be true or false")
    if has_chains:
        tokens = own.session_tokens
        if "session_tokens" in fields:
            tokens = integer_of(fields["session_tokens"], f"{path}.session_tokens", least=2)
        chains, hosts = chains_of_document(fields, path, tokens)
        packing = packing_goal(fields.get("packing", own.packing), f"{path}.packing")
        return ModelPlacement(
            ModelKey(name, version),
            slo_ns,
            float16,
            (),
            chains,
            hosts,
            session_tokens=tokens,
            objectives=_objectives(fields, path, own.objectives),
            packing=packing,
        )
    pipelines = tuple(
        _pipeline(pipeline, f"{path}.pipelines[{i}]")
        for i, pipeline in items_of(fields["pipelines"], f"{path}.pipelines")
    )
    return ModelPlacement(ModelKey(name, version), slo_ns, float16, pipelines)


def _pipeline(entry: object, path: str) -> PipelinePlacement:
    fields = fields_of(entry, path, required=("batch", "partitions"), optional=("shared",))
    batch = integer_of(fields["batch"], f"{path}.batch", least=1)
    is_shared = fields.get("shared", False)
    if not isinstance(is_shared, bool):
        raise InvalidInput(f"{path}.shared", "must be true or false")
    stages = tuple(
        _stage(stage, f"{path}.partitions[{i}]")
        for i, stage in items_of(fields["partitions"], f"{path}.partitions")
    )
    expected = 0
    for i, stage in enumerate(stages):
        if stage.first_block != expected:
            where = f"{path}.partitions[{i}].blocks[0]"
            raise InvalidInput(where, f"must be {expected}: partitions follow each other")
        expected = stage.last_block
    return PipelinePlacement(batch, stages, is_shared)


def _stage(entry: object, path: str) -> StagePlacement:
    fields = fields_of(entry, path, required=("blocks", "agents"), optional=())
    first, last = blocks_of(fields["blocks"], f"{path}.blocks")
    agents = [
        AgentId(text_of(agent, f"{path}.agents[{i}]"))
        for i, agent in items_of(fields["agents"], f"{path}.agents")
    ]
    if len(set(agents)) != len(agents):
        raise InvalidInput(f"{path}.agents", "an agent is listed twice")
    return StagePlacement(first, last, tuple(agents))
