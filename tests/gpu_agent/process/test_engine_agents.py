"""An engine's agent beside a ring of two: sessions, moves between them, the loss of the engine.

The agents run in this process, the engine is a child of it. All generate the same token at the same
place, so a gap or a repetition is seen at once.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from catenary_agent.process import AgentProcess
from catenary_agent.supervision.termination import EXIT_DEVICE_LOST
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from engines.engine_models import BLOCKS, SESSION_TOKENS, engine_model
from engines.fake_engine import fake_python, token_at
from small_models.tiny_tokenizer import END, MORE
from tests.gpu_agent.process.test_decoders import caller_of, introduce
from tests.gpu_agent.process.test_termination import Exit
from tests.support.ring_harness import Caller, Span, opening

KEY = ModelKey("tiny", "1")
PROMPT = [5, 6, 7, 8]
ENGINE: list[Span] = [("engine", 0, BLOCKS)]
RING: list[Span] = [("ring-0", 0, 2), ("ring-1", 2, BLOCKS)]
SLOTS = 4 * BLOCKS


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    root = tmp_path_factory.mktemp("models")
    engine_model(root, KEY.name, platform="decoder", arguments=("fake.token_s=0.02",))
    return ModelRepository(root)


def order(span: Span, slots: int = SLOTS) -> scheduler_pb2.LoadPartition:
    _, first, last = span
    return scheduler_pb2.LoadPartition(
        key=scheduler_pb2.PartitionKey(
            model=KEY.name, model_version=KEY.version, first_block=first, last_block=last
        ),
        cache=scheduler_pb2.CacheLayout(block_slots=slots, session_tokens=SESSION_TOKENS),
        max_batch=8,
    )


def expected(first: int, count: int) -> list[int]:
    return [token_at(first + each, MORE, END) for each in range(count)]


async def serving(bench, tmp_path) -> tuple[object, Caller, AgentProcess]:
    """Starts all three agents; returns the scheduler, a gateway and the engine's agent."""
    scheduler, caller = await bench.scheduler(), await caller_of(bench)
    times = tmp_path / "times.json"
    times.write_text(json.dumps({KEY.name: {"prefill_ns": 100_000, "decode_ns": 5_000_000}}))
    ring = {"device": "emulated:old", "emulated_profile": times}
    engine = {"decoder": "llama_server", "engine_python": fake_python(tmp_path)}
    agents = []
    for count, (span, settings) in enumerate(
        [(RING[0], ring), (RING[1], ring), (ENGINE[0], engine)]
    ):
        agents.append(await bench.agent(scheduler.port, agent_id=span[0], **settings))
        await scheduler.wait_for("hello", count + 1)
        await scheduler.order(load_partition=order(span))
        await scheduler.wait_for("partition_loaded", count + 1)
    introduce(caller, *agents)
    return scheduler, caller, agents[-1]


async def test_a_stream_moves_between_an_engine_and_a_ring(bench, tmp_path) -> None:
    scheduler, caller, _ = await serving(bench, tmp_path)
    hello, loaded = scheduler.of("hello")[-1], scheduler.of("partition_loaded")[-1]
    assert hello.decoder_runtime == "llama-server"
    assert loaded.generation.decode_ns > 10_000_000  # as it was measured
    await caller.open(1, opening(ENGINE, PROMPT, max_tokens=120, model=KEY))
    await caller.wait_for(1, 5)
    await caller.move(1, 2, RING, by_tokens=True)
    await caller.wait_for(2, 5)
    await caller.move(2, 3, ENGINE, by_tokens=True)
    await caller.wait_for(3, 1)
    assert await caller.ended(3) == expected(len(PROMPT), 120)
    assert not caller.wrong


async def test_sessions_of_a_killed_engine_go_on_in_the_ring(bench, tmp_path) -> None:
    scheduler, caller, agent = await serving(bench, tmp_path)
    left = Exit(agent)
    for session in (1, 2, 3):
        await caller.open(session, opening(ENGINE, PROMPT, max_tokens=100, model=KEY))
    for session in (1, 2, 3):
        await caller.wait_for(session, 3)
    (decoder,) = agent.generation.decoders
    os.kill(decoder.batcher.executor.child.pid, signal.SIGKILL)
    failed = await scheduler.wait_for("session_failed", 3)
    # Its connections may break before its process is known to have ended.
    assert {each.failure.reason for each in failed} <= {"DEVICE_LOST", "PARTITION_LOST"}
    assert await left.code() == EXIT_DEVICE_LOST
    (ending,) = await scheduler.wait_for("ending")
    assert ending.reason == "DEVICE_LOST"
    for session in (1, 2, 3):
        known = caller.known(session)
        again = opening(RING, known, max_tokens=100, prompt_tokens=len(PROMPT), model=KEY)
        await caller.open(session + 10, again)
    for session in (1, 2, 3):
        came = len(caller.answer(session))
        rest = await caller.finished(session + 10)
        assert rest == expected(len(PROMPT) + came, 100 - came)


async def test_an_engine_gets_no_more_room_than_it_was_started_with(bench, tmp_path) -> None:
    scheduler, caller, agent = await serving(bench, tmp_path)
    await scheduler.order(load_partition=order(ENGINE[0], slots=SLOTS // 2))
    await scheduler.wait_for("partition_loaded", 4)
    assert agent.generation.block_slots == (0, SLOTS // 2)
    await scheduler.order(load_partition=order(ENGINE[0], slots=2 * SLOTS))
    (failed,) = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "PLAN_INFEASIBLE"
    assert "was started with less room" in failed.failure.message
    await caller.open(1, opening(ENGINE, PROMPT, max_tokens=5, model=KEY))
    assert await caller.finished(1) == expected(len(PROMPT), 5)
