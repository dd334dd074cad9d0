"""One model, served by an engine and by a ring of two agents that run its blocks.

All executors generate the same token at the same place, so whatever goes on elsewhere is known
beforehand, and a gap or a repetition is seen at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import openai
import psutil
import pytest

import catenary
from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from engines.engine_models import engine_model
from engines.fake_engine import fake_python, token_at
from machine_faults.idle_book import idle_book
from small_models.tiny_tokenizer import END, MORE

MODEL = "tiny"
ENGINE = "engine"
TOKENS, LONG = 150, 400
LONGEST_S = 90.0


def cluster_in(folder: Path) -> LiveCluster:
    engine_model(folder / "models", MODEL, platform="decoder", arguments=("fake.token_s=0.02",))
    times = folder / "times.json"
    times.write_text(json.dumps({MODEL: {"prefill_ns": 100_000, "decode_ns": 7_000_000}}))
    ring = [
        {"agent_id": f"ring-{number}", "device": "emulated:old", "emulated_profile": str(times)}
        for number in range(2)
    ]
    engine = {
        "agent_id": ENGINE,
        "device": "cpu",
        "decoder": "llama_server",
        "engine_python": str(fake_python(folder)),
    }
    options = ClusterOptions(
        3,
        device="emulated:old",
        models=(MODEL,),
        each_agent=(*ring, engine),
    )
    return LiveCluster(options, folder, EMULATED, {"expected_agents": 3, "chain_agents": 2})


def is_known(result: catenary.GenerationResult) -> bool:
    first = result.usage.prompt_tokens
    return list(result.token_ids) == [
        token_at(first + each, MORE, END) for each in range(len(result.token_ids))
    ]


def engine_process() -> psutil.Process | None:
    for child in psutil.Process().children(recursive=True):
        try:
            if "engine_child.py" in " ".join(child.cmdline()) and child.status() != "zombie":
                return child
        except psutil.NoSuchProcess:
            continue
    return None


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def by_agent(client: catenary.AsyncClient) -> dict[str, list[int]]:
    """The sessions that generate, by the first agent of their chain."""
    found: dict[str, list[int]] = {}
    for session in await client.sessions(MODEL):
        if session.generates and not session.moving_to:
            found.setdefault(session.hops[0][0], []).append(session.session_id)
    return found


def ask(
    client: catenary.AsyncClient, tokens: int = TOKENS
) -> asyncio.Task[catenary.GenerationResult]:
    return asyncio.ensure_future(client.chat(MODEL, "hello", max_tokens=tokens))


async def chats_over_http(cluster: LiveCluster) -> None:
    base = f"http://127.0.0.1:{cluster.http_port}/v1"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    async with openai.AsyncOpenAI(base_url=base, api_key="none", timeout=60) as client:
        whole = await client.chat.completions.create(**asked)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        stream = await client.chat.completions.create(**asked, stream=True)
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        assert "".join(pieces) == whole.choices[0].message.content


async def sessions_are_on_both(client: catenary.AsyncClient) -> None:
    asked = [ask(client, 60) for _ in range(12)]  # more than the engine takes

    async def both() -> bool:
        return len(await by_agent(client)) == 2

    await until(both, "sessions are on the engine and on the ring")
    assert all(is_known(result) for result in await asyncio.gather(*asked))


async def only_session(client: catenary.AsyncClient) -> tuple[str, int]:
    """The first agent and the id of the one session that generates."""

    async def generates() -> bool:
        return sum(map(len, (await by_agent(client)).values())) == 1

    await until(generates, "one session generates")
    ((agent, (session,)),) = (await by_agent(client)).items()
    return agent, session


async def a_stream_moves_to_and_fro(client: catenary.AsyncClient) -> None:
    answer = ask(client, LONG)
    seen = []
    for _ in range(3):
        agent, session = await only_session(client)
        seen.append(agent)
        if len(seen) < 3:
            moved = await client.move_session(session)
            assert moved.outcome == "moved", moved.problem
            assert moved.mode == "tokens"
    assert seen in ([ENGINE, "ring-0", ENGINE], ["ring-0", ENGINE, "ring-0"])
    result = await answer
    assert is_known(result)
    assert len(result.token_ids) == LONG


async def streams_survive_the_engine(client: catenary.AsyncClient) -> None:
    asked = [ask(client) for _ in range(6)]

    async def on_engine() -> bool:
        return ENGINE in await by_agent(client)

    await until(on_engine, "the engine has sessions")
    engine = engine_process()
    assert engine is not None
    os.kill(engine.pid, signal.SIGKILL)
    results = await asyncio.gather(*asked)
    assert all(is_known(result) and len(result.token_ids) == TOKENS for result in results)
    assert any(result.chain_changes for result in results)


async def the_engine_comes_back(client: catenary.AsyncClient) -> None:
    async def serves() -> bool:
        asked = [ask(client, 30) for _ in range(6)]
        found: set[str] = set()
        while not all(task.done() for task in asked):
            found |= (await by_agent(client)).keys()
            await asyncio.sleep(0.05)
        assert all(is_known(task.result()) for task in asked)
        return ENGINE in found

    await until(serves, "the engine serves again")


@pytest.mark.timeout(400)
async def test_an_engine_and_a_ring_serve_one_model(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    async with cluster.serving(lambda _: None), cluster.client(120.0) as client:
        await chats_over_http(cluster)
        await sessions_are_on_both(client)
        await a_stream_moves_to_and_fro(client)
        await streams_survive_the_engine(client)
        await the_engine_comes_back(client)
        assert await client.drain(ENGINE)
        asked = [ask(client, 10) for _ in range(2)]
        assert all(is_known(result) for result in await asyncio.gather(*asked))
        target, admin = cluster.target, cluster.admin_target
        await asyncio.to_thread(idle_book, target, admin, "engine_beside_blocks", 60.0)
    assert engine_process() is None
