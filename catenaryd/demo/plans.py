"""The plans that the demo puts in force, as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catenary.rpc.plan_search import PlannedPipeline
from catenary_scheduler.planning import DeployedModel, even_split
from catenary_scheduler.planning.placement import placement_document
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.models.model_repository import ModelRepository

VISION_MODEL = "efficientnet-lite0"
CHAT_MODEL = "smollm2-135m"
PROCESSORS = ("agent-0", "agent-1", "agent-2")
"""Agents that compute on this machine's processor."""
EMULATED = {"L4-1": "L4", "P4-1": "P4", "P4-2": "P4"}
"""Emulated devices and their classes, named as `catenary plan` names devices that it is asked
about."""
Document = dict[str, Any]


def demo_placement(blocks: int) -> Document:
    """Returns a plan of three partitions: two agents pool the middle one, a third has the ends."""
    first, second = round(blocks * 0.3), round(blocks * 0.75)
    partitions = [
        {"blocks": [0, first], "agents": ["agent-0"]},
        {"blocks": [first, second], "agents": ["agent-1", "agent-2"]},
        {"blocks": [second, blocks], "agents": ["agent-0"]},
    ]
    pipelines = [{"batch": 4, "partitions": partitions}]
    return {"models": [{"name": VISION_MODEL, "slo_ms": 1000, "pipelines": pipelines}]}


def even_placement(repository: ModelRepository) -> Document:
    """Returns the even split of the vision model over the emulated devices.

    It knows neither how fast a device is nor how much memory it has.
    """
    key = repository.resolve(VISION_MODEL)
    manifest = repository.manifest(key)
    model = DeployedModel(
        key, repository.block_table(key), manifest.slo_ns, manifest.max_batch, True
    )
    agents = [
        Agent(AgentId(name), device_class, ServerId(name), 0, 0)
        for name, device_class in EMULATED.items()
    ]
    return placement_document(even_split([model], agents))


def placement_of(pipelines: Sequence[PlannedPipeline]) -> Document:
    """Returns the answer to a question about the emulated devices as a plan for them."""
    return {
        "models": [
            {
                "name": VISION_MODEL,
                "pipelines": [
                    {
                        "batch": pipeline.batch,
                        "partitions": [
                            {
                                "blocks": [pool.first_block, pool.last_block],
                                "agents": list(pool.agent_ids),
                            }
                            for pool in pipeline.stages
                        ],
                    }
                    for pipeline in pipelines
                ],
            }
        ]
    }


def with_chats(placement: Document, blocks: int, sessions: int = 4) -> Document:
    """Returns a plan with two chains for chats beside, which share the agent of the second half."""
    middle = blocks // 2
    last = {"agent": PROCESSORS[0], "blocks": [middle, blocks]}
    chains = [
        {"capacity": sessions, "hops": [{"agent": agent, "blocks": [0, middle]}, last]}
        for agent in PROCESSORS[1:]
    ]
    return {"models": [*placement["models"], {"name": CHAT_MODEL, "chains": chains}]}


def in_words(placement: Document) -> list[str]:
    """Returns what runs where for the vision model, a line for each pipeline."""
    model = next(each for each in placement["models"] if each["name"] == VISION_MODEL)
    return [
        ", then ".join(
            f"blocks {part['blocks'][0]} to {part['blocks'][1] - 1} on"
            f" {' or '.join(part['agents'])}"
            for part in pipeline["partitions"]
        )
        for pipeline in model["pipelines"]
    ]
