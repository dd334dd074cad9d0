"""One model, served by an engine and by a ring of two agents that run its blocks.

All executors generate the same token at the same place, so whatever goes on elsewhere is known
beforehand, and a gap or a repetition is seen at once. `tests/system/engines` does the same with
real engines.
"""

from __future__ import annotations

import json
from pathlib import Path

import openai
import psutil
import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from engines.beside_ring import ENGINE, RING, EngineBesideRing, engines_of
from engines.engine_models import engine_model
from engines.fake_engine import fake_python, token_at
from small_models.tiny_tokenizer import END, MORE

MODEL = "tiny"


def cluster_in(folder: Path) -> LiveCluster:
    engine_model(folder / "models", MODEL, platform="decoder", arguments=("fake.token_s=0.02",))
    times = folder / "times.json"
    times.write_text(json.dumps({MODEL: {"prefill_ns": 100_000, "decode_ns": 7_000_000}}))
    ring = [
        {"agent_id": name, "device": "emulated:old", "emulated_profile": str(times)}
        for name in RING
    ]
    engine = {
        "agent_id": ENGINE,
        "device": "cpu",
        "decoder": "llama_server",
        "engine_python": str(fake_python(folder)),
    }
    options = ClusterOptions(3, device="emulated:old", models=(MODEL,), each_agent=(*ring, engine))
    return LiveCluster(options, folder, EMULATED, {"expected_agents": 3, "chain_agents": 2})


def is_right(result: catenary.GenerationResult) -> bool:
    first = result.usage.prompt_tokens
    return list(result.token_ids) == [
        token_at(first + each, MORE, END) for each in range(len(result.token_ids))
    ]


async def a_stream_has_the_pieces_of_the_whole_answer(cluster: LiveCluster) -> None:
    base = f"http://127.0.0.1:{cluster.http_port}/v1"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    async with openai.AsyncOpenAI(base_url=base, api_key="none", timeout=60) as client:
        whole = await client.chat.completions.create(**asked)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        stream = await client.chat.completions.create(**asked, stream=True)
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.timeout(400)
async def test_an_engine_and_a_ring_serve_one_model(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    async with cluster.serving(lambda _: None), cluster.client(120.0) as client:
        there = EngineBesideRing(cluster, client, MODEL, is_right)
        await a_stream_has_the_pieces_of_the_whole_answer(cluster)
        await there.sessions_are_on_both(12, 30)
        await there.stream_moves_to_and_fro(150)
        await there.streams_survive_the_engine(6, 60)
    assert not engines_of(psutil.Process())
