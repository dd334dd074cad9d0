"""Agents with empty model folders of their own, which fetch what they are to load from their peers.

A language model and a vision model are served by two such agents. All files are with the gateway,
or with a third agent that serves nothing, while the gateway's folder is empty, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import catenary
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store.kept import KeptVersion, is_kept
from catenaryd.demo.demo_models import preprocess, sample_photographs
from catenaryd.demo.photographs import unsplit_logits
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from cluster_harness import MODEL
from fault_cluster import install_images
from language_model import KEY, answer_to, install, ring_placement
from language_model import MODEL as CHAT_MODEL
from small_models.prompts import PROMPTS

pytestmark = pytest.mark.timeout(900)  # the first test of all imports the model

TOKENS = 12


def placement(blocks: int) -> dict[str, Any]:
    """Returns a plan in which two agents share both models."""
    half = blocks // 2
    parts = [
        {"blocks": [0, half], "agents": ["agent-0"]},
        {"blocks": [half, blocks], "agents": ["agent-1"]},
    ]
    photographs = {"name": MODEL, "slo_ms": 5000, "pipelines": [{"batch": 1, "partitions": parts}]}
    return {"models": [ring_placement(30, agents=2), photographs]}


@asynccontextmanager
async def cluster(data_dir: Path, owner: str) -> AsyncIterator[LocalCluster]:
    """Runs a cluster in which only the scheduler and `owner` have the models."""
    models = data_dir / "models"
    install(models)
    vision = install_images(models)
    plan = data_dir / "plan.json"
    plan.write_text(json.dumps(placement(ModelRepository(models).block_table(vision).blocks)))
    running = LocalCluster(
        ClusterOptions(
            agents=3,
            models=(CHAT_MODEL, MODEL),
            grpc_port=0,
            http_port=0,
            data_dir=data_dir,
            plan_file=plan,
            tls=True,
            extra={"agent": {"transports": ["tcp"]}, "gateway": folder_of(data_dir, "gateway")}
            if owner != "gateway"
            else {"agent": {"transports": ["tcp"]}},
            each_agent=tuple(
                {} if name == owner else folder_of(data_dir, name)
                for name in ("agent-0", "agent-1", "agent-2")
            ),
        )
    )
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


def folder_of(data_dir: Path, name: str) -> dict[str, Any]:
    return {"model_repository": data_dir / "own" / name}


def fetched(folder: Path, key: ModelKey) -> tuple[int, int]:
    """Returns the bytes of a model that a process has fetched, and the size of the model."""
    repository = ModelRepository(folder)
    assert is_kept(repository.folder(key))
    record = repository.content(key)
    assert record is not None
    return KeptVersion(repository.folder(key), record).bytes_here()


@pytest.mark.parametrize("owner", ["agent-2", pytest.param("gateway", marks=pytest.mark.nightly)])
async def test_agents_fetch_their_share_from_whoever_has_it(tmp_path: Path, owner: str) -> None:
    expected = answer_to(PROMPTS[1], TOKENS)
    image = preprocess(sample_photographs()["coffee"])
    async with cluster(tmp_path, owner) as running:
        models = ModelRepository(running.model_repository)
        vision = models.resolve(MODEL)
        whole = unsplit_logits(models, vision, [image])
        async with catenary.AsyncClient(f"127.0.0.1:{running.grpc_port}") as client:
            chat = await client.chat(CHAT_MODEL, PROMPTS[1], max_tokens=TOKENS)
            served = await client.model_metadata(MODEL)
            answer = await client.infer(MODEL, {served.inputs[0].name: image})
        logits = answer.outputs[served.outputs[0].name]
    assert list(chat.token_ids) == expected
    assert int(np.argmax(logits)) == int(np.argmax(whole))
    for name in ("agent-0", "agent-1"):
        here, size = fetched(tmp_path / "own" / name, KEY)
        print(f"{name} has fetched {here / 1e6:.0f} of {size / 1e6:.0f} MB of {KEY}")
        assert 0 < here < 0.6 * size
        assert fetched(tmp_path / "own" / name, vision)[0] > 0
    assert not (tmp_path / "own" / "agent-2").exists()  # it serves nothing, so it fetches nothing
    if owner != "gateway":
        here, size = fetched(tmp_path / "own" / "gateway", KEY)
        assert 0 < here < 0.05 * size, "a gateway needs the tokenizer only"
