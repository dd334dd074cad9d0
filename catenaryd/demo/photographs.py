"""The demo's second screen: photographs over a chain of agents, and where the time of one went."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import catenary
from catenary.waterfall import render_waterfall
from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo import plans, screens
from catenaryd.demo.demo_models import top_k

TOP = 5
_SHOWN = 2


def unsplit_logits(
    repository: ModelRepository, key: ModelKey, images: list[np.ndarray]
) -> np.ndarray:
    """Returns the whole model's answers, computed in this process; shape [images, classes]."""
    blocks = repository.block_table(key).blocks
    executor = load_executor(
        repository,
        PartitionKey(key, 0, blocks),
        device=Device.parse("cpu"),
        float16_boundaries=False,
    )
    try:
        return np.concatenate([executor.run([image])[0] for image in images])
    finally:
        executor.close()


async def classify(
    client: catenary.AsyncClient,
    images: Mapping[str, np.ndarray],
    reference: np.ndarray,
    placement: plans.Document,
) -> bool:
    """Has photographs classified and prints the answers; False if one is not the whole model's."""
    await client.apply_plan(placement)
    screens.begin(
        2,
        "photographs, over a chain of agents",
        f"""A model that fits no single device is cut into blocks, and agents pass on what is
        between them. Three agents compute on this machine's processor, with real weights:
        {plans.in_words(placement)[0]}. The answers have to be those of the model in one piece.""",
    )
    model = await client.model_metadata(plans.VISION_MODEL)
    tensor, output = model.inputs[0].name, model.outputs[0].name
    for _warm in range(2):
        await client.infer(plans.VISION_MODEL, {tensor: next(iter(images.values()))})
    agreed = True
    for (name, image), expected in zip(images.items(), reference, strict=True):
        answer = await client.infer(plans.VISION_MODEL, {tensor: image}, request_id=f"demo-{name}")
        ranked, wanted = top_k(answer.outputs[output][0], TOP), top_k(expected, TOP)
        same = ranked[0][0] == wanted[0][0] and {r[0] for r in ranked} == {w[0] for w in wanted}
        agreed &= same
        best = ", ".join(f"{label} {share:.0%}" for _, label, share in ranked[:_SHOWN])
        screens.show(f"{name:<16} {best:<58} {'equal' if same else 'DIFFERS'}")
    screens.show("")
    trace = await client.trace(f"demo-{[*images][-1]}")
    screens.say("Where the time of the last one went (catenary trace):")
    screens.show(render_waterfall(trace, screens.WIDTH - 2))
    return agreed
