"""SmolLM2, served by a real engine and by a ring of two agents that run its blocks.

vLLM has the ring's weights in float32, so an answer has the same tokens wherever it goes on.
llama-server has the quantised ones of the GGUF file: its answers go on, and are of full length.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import catenary
from catenary_lab.live.cluster import REAL, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from engines.beside_ring import ENGINE, RING, EngineBesideRing, engines_of
from engines.real_engines import REAL_ENGINES, RealEngine
from language_model import MODEL

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SESSIONS, SESSION_TOKENS = 6, 320
LONG = 200
PROMPT = "Count from one to two hundred."


def cluster_in(folder: Path, engine: RealEngine) -> LiveCluster:
    settings = {"agent_id": ENGINE, **engine.settings}
    engine.install(folder / "models", SESSION_TOKENS, SESSIONS)
    options = ClusterOptions(
        3,
        models=(MODEL,),
        each_agent=(*({"agent_id": name} for name in RING), settings),
        ready_timeout_s=600.0,
    )
    scheduler = {"expected_agents": 3, "chain_agents": 2, "load_timeout_s": 600.0}
    return LiveCluster(options, folder, REAL, scheduler)


@pytest.mark.parametrize("name", sorted(REAL_ENGINES))
async def test_streams_go_on_between_an_engine_and_a_ring(name: str, tmp_path: Path) -> None:
    engine = REAL_ENGINES[name]
    cluster = cluster_in(tmp_path, engine)
    async with cluster.serving(lambda _: None), cluster.client() as client:
        first = await client.chat(MODEL, PROMPT, max_tokens=LONG, **GREEDY)
        assert len(first.token_ids) == LONG

        def is_right(result: catenary.GenerationResult) -> bool:
            known = first.token_ids[: len(result.token_ids)]
            return not engine.is_exact or result.token_ids == known

        there = EngineBesideRing(cluster, client, MODEL, is_right, PROMPT, GREEDY)
        plan = await client.plan()
        assert "beside engines" in plan.explanation
        await there.sessions_are_on_both(SESSIONS + 4, 40)
        await there.stream_moves_to_and_fro(LONG)
        await there.streams_survive_the_engine(10, 60)
        await there.engine_serves_again(30)
        await there.engine_is_drained(f"{name} beside blocks")
    assert not engines_of(psutil.Process())
