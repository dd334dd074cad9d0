"""The demo of `make demo`: photographs over a chain of agents, and a chat over a ring."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

import catenary
from catenary.waterfall import render_waterfall
from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import CatenaryError
from catenary_services.log import configure_logging
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo import demo_chat
from catenaryd.demo.demo_models import preprocess, sample_photographs, top_k
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

MODEL = "efficientnet-lite0"
TOP = 5
WATERFALL_WIDTH = 100


def demo_placement(blocks: int) -> dict[str, Any]:
    """Returns a plan of three partitions: two agents pool the middle one, a third has the ends."""
    first, second = round(blocks * 0.3), round(blocks * 0.75)
    return {
        "models": [
            {
                "name": MODEL,
                "slo_ms": 1000,
                "pipelines": [
                    {
                        "batch": 4,
                        "partitions": [
                            {"blocks": [0, first], "agents": ["agent-0"]},
                            {"blocks": [first, second], "agents": ["agent-1", "agent-2"]},
                            {"blocks": [second, blocks], "agents": ["agent-0"]},
                        ],
                    }
                ],
            }
        ]
    }


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


async def run_demo(data_dir: Path) -> int:
    """Runs the demo and returns its exit code: 0 if every answer agrees with the unsplit model."""
    click.echo("preparing efficientnet-lite0 (real ImageNet weights, cut into blocks)")
    key = await asyncio.to_thread(ensure_model, data_dir / "models", MODEL)
    click.echo("preparing smollm2-135m (SmolLM2-135M-Instruct; once, takes a minute)")
    chat_key = await asyncio.to_thread(ensure_model, data_dir / "models", demo_chat.CHAT_MODEL)
    repository = ModelRepository(data_dir / "models")
    plan_file = data_dir / "plan.json"
    placement = demo_placement(repository.block_table(key).blocks)
    chat_blocks = repository.block_table(chat_key).blocks
    placement["models"].append(demo_chat.ring_placement(chat_blocks))
    plan_file.write_text(json.dumps(placement, indent=2))
    photographs = sample_photographs()
    images = [preprocess(file) for file in photographs.values()]
    reference = await asyncio.to_thread(unsplit_logits, repository, key, images)
    answer = await asyncio.to_thread(demo_chat.expected_answer, repository, chat_key)

    cluster = LocalCluster(
        ClusterOptions(
            agents=3,
            models=(MODEL, demo_chat.CHAT_MODEL),
            plan_file=plan_file,
            grpc_port=0,
            http_port=0,
            data_dir=data_dir,
        )
    )
    try:
        click.echo("starting redis, a scheduler, a gateway and three agents")
        facts = await cluster.start(lambda line: click.echo(f"  {line}"))
        async with catenary.AsyncClient(
            str(facts["grpc"]), admin_target=str(facts["admin"])
        ) as client:
            agreed = await _classify(client, list(photographs), images, reference)
            agreed &= await demo_chat.chat(client, answer)
    except CatenaryError as error:
        click.echo(error.message, err=True)
        return 1
    finally:
        await cluster.stop()
    click.echo("stopped" if agreed else "an answer differs from the unsplit model")
    return 0 if agreed else 1


async def _classify(
    client: catenary.AsyncClient, names: list[str], images: list[np.ndarray], reference: np.ndarray
) -> bool:
    agreed = True
    model = await client.model_metadata(MODEL)
    tensor, output = model.inputs[0].name, model.outputs[0].name
    for _warm in range(2):
        await client.infer(MODEL, {tensor: images[0]})
    for name, image, expected in zip(names, images, reference, strict=True):
        answer = await client.infer(MODEL, {tensor: image}, request_id=f"demo-{name}")
        logits = answer.outputs[output][0]
        ranked, wanted = top_k(logits, TOP), top_k(expected, TOP)
        same = ranked[0][0] == wanted[0][0] and {r[0] for r in ranked} == {w[0] for w in wanted}
        agreed &= same
        verdict = "as the unsplit model" if same else "DIFFERS from the unsplit model"
        click.echo(f"\n{name} (top-{TOP} {verdict})")
        for _, label, probability in ranked:
            click.echo(f"  {probability:6.1%}  {label}")
    trace = await client.trace(f"demo-{names[-1]}")
    click.echo(f"\nwhere the time of {trace.request_id} went")
    click.echo(render_waterfall(trace, WATERFALL_WIDTH))
    return agreed


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".catenary/demo"),
    show_default=True,
    help="Models, logs and Redis data.",
)
def demo(data_dir: Path) -> None:
    """Serves photographs and a chat over three agents and shows where the time went.

    Example: catenaryd demo
    """
    configure_logging("demo", "local", "error", False)
    sys.exit(asyncio.run(run_demo(data_dir)))
