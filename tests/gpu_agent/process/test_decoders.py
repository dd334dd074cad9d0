"""Agent processes that generate: partitions ordered, sessions served, closed, drained."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from shared_helpers.waiting import until
from tests.support.agent_harness import TestPeer, peer_of
from tests.support.ring_harness import Caller, opening
from tiny_language_models import LAYERS, greedy, worker_in_this_process, write_folder

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

KEY = ModelKey("tiny-llm", "1")
PROMPT = [(3 * i * i + 10) % 150 + 3 for i in range(11)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRepository, Any]:
    root = tmp_path_factory.mktemp("tiny-llm")
    whole = write_folder(root / "source", "llama3")
    repository = ModelRepository(root / "models")
    with worker_in_this_process():
        import_decoder(repository, root / "source", KEY, ImportOptions(session_tokens=64))
    return repository, whole


@pytest.fixture(scope="module")
def repository(model: tuple[ModelRepository, Any]) -> ModelRepository:
    return model[0]


def order(first: int, last: int, slots: int = 60, tokens: int = 64, *entries: int, **changes):
    return scheduler_pb2.LoadPartition(
        key=key(first, last),
        cache=scheduler_pb2.CacheLayout(
            block_slots=slots, session_tokens=tokens, entry_blocks=entries
        ),
        **{"max_batch": 8, **changes},
    )


def key(first: int, last: int) -> scheduler_pb2.PartitionKey:
    return scheduler_pb2.PartitionKey(
        model=KEY.name, model_version=KEY.version, first_block=first, last_block=last
    )


async def caller_of(bench) -> Caller:
    hub = bench.net._hub("gw-0")
    made = Caller(TestPeer("gw-0", hub))
    await hub.start(made.on_frame)
    return made


def introduce(caller: Caller, *agents) -> None:
    peers = [peer_of(a.name, a.hub, a.incarnation) for a in agents]
    peers.append(peer_of("gw-0", caller.peer.hub))
    for hub in (caller.peer.hub, *(a.hub for a in agents)):
        hub.update_directory(peers)


async def test_a_ring_of_processes_says_what_the_whole_model_says(bench, model):
    scheduler, caller = await bench.scheduler(), await caller_of(bench)
    spans = [("a-0", 0, 2), ("a-1", 2, LAYERS)]
    agents = []
    for i, (name, first, last) in enumerate(spans):
        agents.append(await bench.agent(scheduler.port, agent_id=name, prefill_chunk_tokens=4))
        await scheduler.wait_for("hello", i + 1)
        await scheduler.order(load_partition=order(first, last))
        [*_, loaded] = await scheduler.wait_for("partition_loaded", i + 1)
        cost = loaded.generation
        assert (cost.block_slots, cost.session_tokens) == (60, 64)
        assert cost.decode_ns + cost.decode_session_ns > 0
        assert cost.prefill_ns + cost.prefill_token_ns > 0
        table = bench.repository.decoder_table(KEY)
        assert loaded.memory_bytes > 60 * table.slot_bytes(64)
    introduce(caller, *agents)
    for session in (1, 2, 3):
        made = opening(spans, PROMPT[: 5 + session], max_tokens=12, model=KEY)
        await caller.open(session, made)
    for session in (1, 2, 3):
        assert await caller.finished(session) == greedy(model[1], PROMPT[: 5 + session], 12)
    closed = await scheduler.wait_for("sessions_closed", 6)
    assert sorted(s for each in closed for s in each.session_ids) == [1, 1, 2, 2, 3, 3]
    assert all(agent.generation.block_slots == (0, 60) for agent in agents)


async def test_a_layout_is_changed_in_place_while_a_session_goes_on(bench, model):
    scheduler, caller = await bench.scheduler(), await caller_of(bench)
    agent = await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=order(0, LAYERS, slots=LAYERS))
    await scheduler.wait_for("partition_loaded")
    introduce(caller, agent)
    executor = next(iter(agent.generation.decoders)).batcher.executor
    ring = [("a-0", 0, LAYERS)]
    await caller.open(1, opening(ring, PROMPT, max_tokens=50, model=KEY))
    await caller.wait_for(1, 2)
    await scheduler.order(load_partition=order(0, LAYERS, 3 * LAYERS, 128, 2))
    [_, changed] = await scheduler.wait_for("partition_loaded", 2)
    assert (changed.generation.block_slots, changed.generation.session_tokens) == (18, 128)
    assert next(iter(agent.generation.decoders)).batcher.executor is executor
    await scheduler.order(load_partition=order(0, LAYERS, 3 * LAYERS, 128, 2))
    await scheduler.wait_for("partition_loaded", 3)  # as it is: answered at once
    await caller.open(2, opening(ring, PROMPT, max_tokens=80, model=KEY))
    assert await caller.finished(1) == greedy(model[1], PROMPT, 50)
    assert await caller.finished(2) == greedy(model[1], PROMPT, 80)


@pytest.mark.parametrize(
    ("made", "reason", "says"),
    [
        (order(0, 99), "INVALID_INPUT", "99"),
        (order(0, LAYERS, 60, 64, 17), "INVALID_INPUT", "entry_blocks"),
        (order(0, LAYERS, 60, 4096), "INVALID_INPUT", "session_tokens"),
        (order(0, LAYERS, 60, 0), "INVALID_INPUT", "session_tokens"),
        (order(0, LAYERS, 1 << 24), "PLAN_INFEASIBLE", "does not fit"),
        (order(0, LAYERS, block_table_hash="f" * 64), "PLAN_INFEASIBLE", "another model"),
    ],
)
async def test_an_impossible_layout_is_answered_with_the_reason(bench, made, reason, says):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port, memory_bytes=1 << 30)
    await scheduler.order_when_there(load_partition=made)
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == reason
    assert says in failed.failure.message
    assert failed.out_of_memory == ("fit" in says)
    assert list(agent.generation.decoders) == []


async def test_close_orders_are_obeyed_and_a_new_leader_hears_of_what_is_left(bench):
    scheduler, caller = await bench.scheduler(epoch=1), await caller_of(bench)
    agent = await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=order(0, LAYERS, 60, 128))
    await scheduler.wait_for("partition_loaded")
    introduce(caller, agent)
    ring = [("a-0", 0, LAYERS)]
    for session in (1, 2):
        await caller.open(session, opening(ring, PROMPT, max_tokens=110, model=KEY))
    await until(lambda: agent.generation.sessions == 2)  # orders and frames come on two ways
    await scheduler.order(close_sessions=scheduler_pb2.CloseSessions(session_ids=[1, 9]))
    [closed, *_] = await scheduler.wait_for("sessions_closed")
    assert list(closed.session_ids) == [1, 9]
    batcher = next(iter(agent.generation.decoders)).batcher
    real = batcher.executor.step
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(items):  # the session is still there when the new leader comes
        asyncio.run_coroutine_threadsafe(stop.wait(), loop).result(10)
        return real(items)

    batcher.executor.step = step
    await scheduler.stop()
    new = await bench.scheduler(epoch=2, port=scheduler.port)
    [hello] = await new.wait_for("hello")
    stop.set()
    assert [each.session_id for each in hello.sessions] == [2]
    assert [each.generation.block_slots for each in hello.partitions] == [60]
    await caller.finished(2)


async def test_a_drain_waits_for_the_sessions(bench):
    scheduler, caller = await bench.scheduler(), await caller_of(bench)
    agent = await bench.agent(scheduler.port, health_port=None)
    await scheduler.order_when_there(load_partition=order(0, LAYERS, 60, 128))
    await scheduler.wait_for("partition_loaded")
    introduce(caller, agent)
    await caller.open(1, opening([("a-0", 0, LAYERS)], PROMPT, max_tokens=100, model=KEY))
    await caller.wait_for(1, 1)
    await scheduler.order(drain=scheduler_pb2.Drain())
    await scheduler.wait_for("drained")
    kinds = [m.WhichOneof("kind") for m in scheduler.heard]
    assert kinds.index("sessions_closed") < kinds.index("drained")
    assert agent.generation.sessions == 0


async def test_an_unloaded_partition_goes_with_its_last_session(bench):
    scheduler, caller = await bench.scheduler(), await caller_of(bench)
    agent = await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=order(0, LAYERS, 60, 128))
    await scheduler.wait_for("partition_loaded")
    introduce(caller, agent)
    held = agent.generation.decoders.memory_bytes
    await caller.open(1, opening([("a-0", 0, LAYERS)], PROMPT, max_tokens=110, model=KEY))
    await caller.wait_for(1, 1)
    await scheduler.order(unload_partition=scheduler_pb2.UnloadPartition(key=key(0, LAYERS)))
    await until(lambda: not list(agent.generation.decoders))
    await caller.open(2, opening([("a-0", 0, LAYERS)], PROMPT, max_tokens=4, model=KEY))
    [failed] = await scheduler.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (2, "PARTITION_LOST")
    assert len(await caller.finished(1)) == 110
    await until(lambda: agent.generation.decoders.memory_bytes == 0)
    assert held > 0


@pytest.mark.parametrize("library", ["onnx", "torch"])
async def test_decoder_blocks_are_compared_with_what_the_first_agent_answered(
    bench, model, library
):
    scheduler = await bench.scheduler()
    folder = bench.repository.folder(KEY) / ".canaries"
    before = set(folder.iterdir()) if folder.exists() else set()
    for number, name in enumerate(("a-0", "a-1"), 1):
        await bench.agent(scheduler.port, agent_id=name, canary="on", decoder=library)
        await scheduler.wait_for("hello", number)
        for at, span in enumerate(((0, 2), (2, LAYERS)), 1):
            await scheduler.order(load_partition=order(*span))
            await scheduler.wait_for("partition_loaded", 2 * number - 2 + at)
    made = set(folder.iterdir()) - before
    assert len(made) == 2  # a range of blocks each; the second agent made none
    for file in made:
        file.write_text(file.read_text().replace("0.", "7."))
    await bench.agent(scheduler.port, agent_id="a-2", canary="on", decoder=library)
    await scheduler.wait_for("hello", 3)
    await scheduler.order(load_partition=order(0, 2))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "CANARY_FAILED"
