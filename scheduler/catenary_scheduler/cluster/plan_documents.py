"""Reads placements from outside: a plan file, `ApplyPlan`, or the record of an earlier leader."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from catenary_scheduler.agents.deployments import Deployment, Deployments
from catenary_scheduler.planning import Placement, parse_placement
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey
from catenary_services.errors import InvalidInput, ModelNotFound


def document_of(text: str) -> dict[str, object]:
    """Returns the JSON object in `text`.

    Raises:
        InvalidInput: The text is not a JSON object.
    """
    try:
        document = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError as error:
        raise InvalidInput("plan", f"is neither JSON nor YAML: {error}") from None
    if not isinstance(document, dict):
        raise InvalidInput("plan", "must be an object with a list of models")
    return document


async def placement_of(text: str, deployments: Deployments) -> Placement:
    """Returns the placement that a document describes, and deploys its models if they are not.

    Raises:
        InvalidInput: A field is wrong; the error names it.
        ModelNotFound: A model is not in the repository.
    """
    document = document_of(text)
    document.pop("last_switch", None)  # what `catenary plan show` adds for its reader
    entries = document.get("models")
    if isinstance(entries, list):
        filled = [await _filled(entry, deployments) for entry in entries]
        document = {**document, "models": filled}
    placement = parse_placement(document)
    check_blocks(placement, deployments.ready)
    return placement


def check_blocks(placement: Placement, ready: Mapping[ModelKey, Deployment]) -> None:
    """Compares a placement with those of its models that are deployed.

    Raises:
        InvalidInput: A field is wrong; the error names it.
    """
    for index, model in enumerate(placement.models):
        deployment = ready.get(model.model)
        if deployment is None:
            continue
        blocks = deployment.table.blocks
        if (deployment.decoder is not None) != bool(model.chains):
            other = "pipelines" if deployment.decoder is not None else "chains"
            raise InvalidInput(f"models[{index}].{other}", f"{model.model} is not served by these")
        for number, chain in enumerate(model.chains):
            if chain.hops[-1].last_block != blocks:
                raise InvalidInput(
                    f"models[{index}].chains[{number}].hops",
                    f"end at block {chain.hops[-1].last_block}; {model.model} has {blocks}",
                )
        for number, pipeline in enumerate(model.pipelines):
            if pipeline.stages[-1].last_block != blocks:
                raise InvalidInput(
                    f"models[{index}].pipelines[{number}].partitions",
                    f"end at block {pipeline.stages[-1].last_block}; {model.model} has {blocks}",
                )


async def _filled(entry: object, deployments: Deployments) -> object:
    """Returns an entry of a document, completed by the manifest of its model."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return entry  # the parser says what is wrong with it
    name, version = str(entry["name"]), str(entry.get("version") or "")
    key = deployments.resolve(name, version)
    if key is None:
        reference = f"{name}:{version}" if version else name
        await deployments.want([reference])
        key = deployments.resolve(name, version)
        if key is None:
            raise ModelNotFound(deployments.problems.get(reference, f"no model {reference}"))
    deployment = deployments.ready[key]
    defaults: dict[str, object] = {
        "slo_ms": deployment.slo_ns / NANOSECONDS_PER_MILLISECOND,
        "float16_boundaries": deployment.manifest.float16_boundaries,
    }
    if deployment.decoder is not None and "chains" in entry:
        defaults["session_tokens"] = deployment.manifest.session_tokens
        if deployment.manifest.objectives is not None:
            for name, slo_ns in deployment.manifest.objectives.named().items():
                defaults[name] = slo_ns / NANOSECONDS_PER_MILLISECOND
        defaults["packing"] = deployment.packing
    return {**defaults, **entry, "name": key.name, "version": key.version}
