"""Placements: the part of a plan a person or a planner decides, without any measured time.

As a document (YAML or JSON)::

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.domain.ids import NANOSECONDS_PER_MILLISECOND, AgentId, ModelKey, Nanoseconds
from services.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Blocks `[first_block, last_block)` on a pool of agents."""

    first_block: int
    last_block: int
    agents: tuple[AgentId, ...]


@dataclass(frozen=True, slots=True)
class PipelinePlacement:
    """Stages that follow each other, and the batch size to aim for."""

    batch_size: int
    stages: tuple[StagePlacement, ...]


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """Pipelines of one model."""

    model: ModelKey
    slo_ns: Nanoseconds
    float16_boundaries: bool
    pipelines: tuple[PipelinePlacement, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """All models of a cluster."""

    models: tuple[ModelPlacement, ...]


@dataclass(frozen=True, slots=True)
class PlacementDefaults:
    """What a document may leave out, by the model's name where it differs."""

    version: str = "1"
    slo_ns: Nanoseconds = 1_000 * NANOSECONDS_PER_MILLISECOND
    float16_boundaries: bool = True
    by_name: Mapping[str, PlacementDefaults] = field(default_factory=dict)

    def of(self, name: str) -> PlacementDefaults:
        """Returns the defaults of a model."""
        return self.by_name.get(name, self)


def parse_placement(
    document: Mapping[str, object], defaults: PlacementDefaults | None = None
) -> Placement:
    """Returns the placement a document describes.

    Raises:
        InvalidInput: If something is missing, unknown or of the wrong kind; `field` names it, e.g.
            "models[0].pipelines[0].batch".
    """
    root = _fields(document, "", required=("models",), optional=())
    defaults = defaults or PlacementDefaults()
    models = tuple(
        _model(entry, f"models[{i}]", defaults) for i, entry in _items(root["models"], "models")
    )
    seen: set[ModelKey] = set()
    for i, model in enumerate(models):
        if model.model in seen:
            raise InvalidInput(f"models[{i}].name", f"{model.model} is listed twice")
        seen.add(model.model)
    return Placement(models)


def placement_document(placement: Placement) -> dict[str, object]:
    """Returns the document `parse_placement` reads back as an equal placement."""
    return {
        "models": [
            {
                "name": model.model.name,
                "version": model.model.version,
                "slo_ms": _milliseconds(model.slo_ns),
                "float16_boundaries": model.float16_boundaries,
                "pipelines": [
                    {
                        "batch": pipeline.batch_size,
                        "partitions": [
                            {
                                "blocks": [stage.first_block, stage.last_block],
                                "agents": list(stage.agents),
                            }
                            for stage in pipeline.stages
                        ],
                    }
                    for pipeline in model.pipelines
                ],
            }
            for model in placement.models
        ]
    }


def _milliseconds(duration: Nanoseconds) -> int | float:
    whole, rest = divmod(duration, NANOSECONDS_PER_MILLISECOND)
    return duration / NANOSECONDS_PER_MILLISECOND if rest else whole


def _model(entry: object, path: str, defaults: PlacementDefaults) -> ModelPlacement:
    optional = ("version", "slo_ms", "float16_boundaries")
    fields = _fields(entry, path, required=("name", "pipelines"), optional=optional)
    name = _text(fields["name"], f"{path}.name")
    own = defaults.of(name)
    version = own.version
    if "version" in fields:
        given = fields["version"]
        is_number = isinstance(given, int) and not isinstance(given, bool)
        version = _text(str(given) if is_number else given, f"{path}.version")
    slo_ns = own.slo_ns
    if "slo_ms" in fields:
        slo_ns = _slo(fields["slo_ms"], f"{path}.slo_ms")
    float16 = fields.get("float16_boundaries", own.float16_boundaries)
    if not isinstance(float16, bool):
        raise InvalidInput(f"{path}.float16_boundaries", "must be true or false")
    pipelines = tuple(
        _pipeline(pipeline, f"{path}.pipelines[{i}]")
        for i, pipeline in _items(fields["pipelines"], f"{path}.pipelines")
    )
    return ModelPlacement(ModelKey(name, version), slo_ns, float16, pipelines)


def _pipeline(entry: object, path: str) -> PipelinePlacement:
    fields = _fields(entry, path, required=("batch", "partitions"), optional=())
    batch = _integer(fields["batch"], f"{path}.batch", least=1)
    stages = tuple(
        _stage(stage, f"{path}.partitions[{i}]")
        for i, stage in _items(fields["partitions"], f"{path}.partitions")
    )
    expected = 0
    for i, stage in enumerate(stages):
        if stage.first_block != expected:
            where = f"{path}.partitions[{i}].blocks[0]"
            raise InvalidInput(where, f"must be {expected}: partitions follow each other")
        expected = stage.last_block
    return PipelinePlacement(batch, stages)


def _stage(entry: object, path: str) -> StagePlacement:
    fields = _fields(entry, path, required=("blocks", "agents"), optional=())
    blocks = [block for _, block in _items(fields["blocks"], f"{path}.blocks")]
    if len(blocks) != 2:
        raise InvalidInput(f"{path}.blocks", "must be two numbers: the first block and the end")
    first = _integer(blocks[0], f"{path}.blocks[0]", least=0)
    last = _integer(blocks[1], f"{path}.blocks[1]", least=first + 1)
    agents = [
        AgentId(_text(agent, f"{path}.agents[{i}]"))
        for i, agent in _items(fields["agents"], f"{path}.agents")
    ]
    if len(set(agents)) != len(agents):
        raise InvalidInput(f"{path}.agents", "an agent is listed twice")
    return StagePlacement(first, last, tuple(agents))


def _fields(
    value: object, path: str, *, required: Sequence[str], optional: Sequence[str]
) -> Mapping[str, object]:
    where = path or "document"
    if not isinstance(value, Mapping):
        raise InvalidInput(where, "must be a mapping")
    prefix = f"{path}." if path else ""
    for name in value:
        if name not in required and name not in optional:
            raise InvalidInput(f"{prefix}{name}", "unknown field")
    for name in required:
        if name not in value:
            raise InvalidInput(f"{prefix}{name}", "is missing")
    return value


def _items(value: object, path: str) -> list[tuple[int, object]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput(path, "must be a list")
    if not value:
        raise InvalidInput(path, "must not be empty")
    return list(enumerate(value))


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(path, "must be a non-empty text")
    return value


def _integer(value: object, path: str, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(path, f"must be a whole number of at least {least}")
    return value


def _slo(value: object, path: str) -> Nanoseconds:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise InvalidInput(path, "must be a positive number of milliseconds")
    return max(1, round(value * NANOSECONDS_PER_MILLISECOND))  # type: ignore[operator]
