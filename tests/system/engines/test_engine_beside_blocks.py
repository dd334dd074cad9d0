"""One model, served by an engine and by a ring of two agents that run its blocks.

The engine of tests and emulated agents generate the same token at the same place. vLLM has SmolLM2's
weights as the ring has them, in float32, so an answer has the same tokens wherever it goes on.
llama-server has the quantised ones of the GGUF file: its answers go on, and are of full length.
"""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, REAL, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from engines.beside_ring import ENGINE, RING, EngineBesideRing, engines_of
from engines.engine_models import engine_model
from engines.fake_engine import fake_python, token_at
from engines.real_engines import REAL_ENGINES
from language_model import MODEL
from small_models.tiny_tokenizer import END, MORE

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "Count from one to two hundred."
SESSIONS, SESSION_TOKENS = 6, 640
SCHEDULER = {"expected_agents": 3, "chain_agents": 2, "load_timeout_s": 600.0}


async def all_of_it(there: EngineBesideRing, name: str, long_tokens: int) -> None:
    plan = await there.client.plan()
    (model,) = plan.document["models"]
    ways = {tuple(hop["agent"] for hop in chain["hops"]) for chain in model["chains"]}
    assert ways in ({(ENGINE,), RING}, {(ENGINE,), RING[::-1]})
    assert "whole, by engines" in plan.explanation
    await there.engine_serves(10)
    await there.sessions_are_on_both(SESSIONS + 4, 40)
    await there.stream_moves_to_and_fro(long_tokens)
    await there.streams_survive_the_engine(10, 60)
    await there.engine_serves(30)
    await there.engine_is_drained(f"{name} beside blocks")


@pytest.mark.parametrize("name", sorted(REAL_ENGINES))
async def test_streams_go_on_between_a_real_engine_and_a_ring(name: str, tmp_path: Path) -> None:
    engine = REAL_ENGINES[name]
    settings = {"agent_id": ENGINE, **engine.settings}
    engine.install(tmp_path / "models", SESSION_TOKENS, SESSIONS)
    agents = (*({"agent_id": each} for each in RING), settings)
    options = ClusterOptions(3, models=(MODEL,), each_agent=agents, ready_timeout_s=600.0)
    cluster = LiveCluster(options, tmp_path, REAL, SCHEDULER)
    async with cluster.serving(lambda _: None), cluster.client() as client:
        first = await client.chat(MODEL, PROMPT, max_tokens=engine.long_tokens, **GREEDY)
        assert len(first.token_ids) == engine.long_tokens

        def is_right(result: catenary.GenerationResult) -> bool:
            known = first.token_ids[: len(result.token_ids)]
            return not engine.is_exact or result.token_ids == known

        await all_of_it(
            EngineBesideRing(cluster, client, MODEL, is_right, PROMPT, GREEDY),
            name,
            engine.long_tokens,
        )
    assert not engines_of(psutil.Process())


async def test_streams_go_on_between_an_engine_of_tests_and_a_ring(tmp_path: Path) -> None:
    engine_model(
        tmp_path / "models",
        platform="decoder",
        arguments=("fake.token_s=0.02",),
        max_batch=SESSIONS,
    )
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"tiny": {"prefill_ns": 100_000, "decode_ns": 7_000_000}}))
    ring = {"device": "emulated:old", "emulated_profile": str(times)}
    engine = {
        "device": "cpu",
        "decoder": "llama_server",
        "engine_python": str(fake_python(tmp_path)),
    }
    agents = (*({"agent_id": each, **ring} for each in RING), {"agent_id": ENGINE, **engine})
    options = ClusterOptions(3, device="emulated:old", models=("tiny",), each_agent=agents)
    cluster = LiveCluster(options, tmp_path, EMULATED, SCHEDULER)

    def is_right(result: catenary.GenerationResult) -> bool:
        first = result.usage.prompt_tokens
        return list(result.token_ids) == [
            token_at(first + each, MORE, END) for each in range(len(result.token_ids))
        ]

    async with cluster.serving(lambda _: None), cluster.client(120.0) as client:
        await all_of_it(
            EngineBesideRing(cluster, client, "tiny", is_right, sampling=GREEDY), "fake", 200
        )
    assert not engines_of(psutil.Process())
