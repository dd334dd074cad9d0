"""Peers with a valid certificate that say whatever they like: they are named, the others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings

from catenary_protos.catenary.v1 import admin_pb2, common_pb2, scheduler_pb2
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.errors import (
    CatenaryError,
    InternalError,
    InvalidInput,
    InvalidMessage,
    Unavailable,
)
from catenary_services.redis.embedded_redis import EmbeddedRedis
from hostile.any_message import messages
from scheduler_harness import (
    MS,
    AgentScript,
    Crowd,
    FakeAgent,
    FakeGateway,
    add_model,
    operated,
    scheduler,
    until,
)
from scheduler_harness import settings as settings_of

Configured = Callable[..., SchedulerSettings]
Up = scheduler_pb2.AgentMessage
FromGateway = scheduler_pb2.GatewayMessage


async def ended(client: Any) -> CatenaryError:
    await until(lambda: client.ended and client.error is not None, "the stream ends")
    error: CatenaryError = client.error
    return error


async def serving(process: SchedulerProcess, crowd: Crowd) -> FakeGateway:
    gateway = await crowd.gateway(process.port)
    await crowd.agent(process.port, "good")
    await until(lambda: gateway.ready, "the model is served")
    return gateway


BAD_REPORT = Up(stage_report=scheduler_pb2.StageReport(batch_id=1, compute_ns=1 << 60))


async def test_an_agent_that_says_what_cannot_be_is_told_the_field(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        liar = await crowd.agent(process.port, "liar")
        await until(lambda: liar.all("welcome"), "it is welcome")
        await liar.send(BAD_REPORT)
        error = await ended(liar)
        assert isinstance(error, InvalidMessage)
        assert "StageReport.compute_ns" in error.message
        await gateway.submit(1)
        await gateway.dispatched(1)
        assert counted(process, "agent") == 1


def counted(process: SchedulerProcess, role: str) -> float:
    registry = process._metrics.registry
    value = registry.get_sample_value("catenary_invalid_messages_total", {"role": role})
    return value or 0.0


async def test_what_an_agent_says_of_the_epoch_ends_nothing(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        for epoch in (2**64 - 1, 2**53 + 1):
            liar = await crowd.agent(process.port, f"liar-{epoch}", AgentScript(epoch=epoch))
            error = await ended(liar)
            assert isinstance(error, InvalidInput)
            assert "hello.epoch" in error.message
        await gateway.submit(1)
        await gateway.dispatched(1)


async def test_who_lies_again_and_again_is_quarantined(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        leader = process.leader(0)
        for _ in range(3):
            assert leader.availability.impairment_of("liar") is None
            liar = await crowd.agent(process.port, "liar")
            await liar.send(BAD_REPORT)
            await ended(liar)
        assert leader.availability.impairment_of("liar") is Impairment.QUARANTINED
        assert leader.availability.impairment_of("good") is None
        # It may come back, and is used by nobody who has a choice; if it goes on it may not.
        for _ in range(3):
            liar = await crowd.agent(process.port, "liar")
            await liar.send(BAD_REPORT)
            await ended(liar)
        error = await ended(await crowd.agent(process.port, "liar"))
        assert isinstance(error, Unavailable)
        await gateway.submit(1)
        await gateway.dispatched(1)


async def test_a_gateway_that_lies_again_and_again_is_refused_for_a_while(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        for _ in range(3):
            liar = await crowd.gateway(process.port, "liar")
            await liar.submit(1, rows=0)
            assert "SubmitRequest.rows" in (await ended(liar)).message
        refused = await ended(await crowd.gateway(process.port, "liar"))
        assert isinstance(refused, Unavailable)
        assert 5_000 * MS < (refused.retry_after_ns or 0) <= 10_000 * MS
        await gateway.submit(1)
        await gateway.dispatched(1)


async def test_operators_are_told_the_field(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id="a|b"))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "agent_id" in (caught.value.details() or "")


# ---- what no rule of a message can see ----


def failure(agent: str = "") -> common_pb2.Failure:
    return common_pb2.Failure(reason="UNAVAILABLE", message="no", agent_id=agent, retryable=True)


def report(batch: int, **changes: Any) -> Up:
    known = {"batch_id": batch, "compute_ended_ago_ns": 1, "compute_ns": MS, "rows": 1}
    return Up(stage_report=scheduler_pb2.StageReport(**{**known, **changes}))


def start(batch: int, **changes: Any) -> Up:
    known = {"batch_id": batch, "started_ago_ns": 1}
    return Up(stage_start=scheduler_pb2.StageStart(**{**known, **changes}))


AGENTS_LIES: dict[str, Callable[[int], Up]] = {
    "a report of a batch of another agent": report,
    "the start of a batch of another agent": start,
    "the start of a transfer into the first hop": lambda batch: start(batch, is_transfer=True),
    "the start of a batch that was never given out": lambda batch: start(batch + 1_000),
    "a failure of a batch of another agent": lambda batch: Up(
        batch_failed=scheduler_pb2.BatchFailed(batch_id=batch, failure=failure())
    ),
    "a report of a batch that was never given out": lambda batch: report(batch + 1_000),
    "the end of a session that was never begun": lambda _: Up(
        session_failed=scheduler_pb2.SessionFailed(session_id=1 << 62, failure=failure())
    ),
    "the move of a session that was never begun": lambda _: Up(
        session_moved=scheduler_pb2.SessionMoved(session_id=1 << 62, moved_session_id=1)
    ),
    "more memory than it has": lambda _: Up(
        partition_loaded=scheduler_pb2.PartitionLoaded(
            key=scheduler_pb2.PartitionKey(model="toy", model_version="1", last_block=4),
            memory_bytes=1 << 50,
        )
    ),
    "blocks that there are not": lambda _: Up(
        partition_loaded=scheduler_pb2.PartitionLoaded(
            key=scheduler_pb2.PartitionKey(model="toy", model_version="1", last_block=99),
            compute_ns=[1],
        )
    ),
}


@pytest.mark.parametrize("lie", AGENTS_LIES.values(), ids=AGENTS_LIES)
async def test_what_an_agent_cannot_know_is_left_out_and_counted(
    configured: Configured, crowd: Crowd, lie: Callable[[int], Up]
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        # Without memory it is given nothing to load.
        liar = await crowd.agent(process.port, "liar", AgentScript(memory_bytes=1))
        await until(lambda: liar.all("welcome"), "it is welcome")
        await gateway.submit(1)
        batch = (await gateway.dispatched(1)).batch_id
        leader = process.leader(0)
        before = leader.dispatcher.snapshot()
        await liar.send(lie(batch))
        await until(lambda: counted(process, "agent") == 1, "it is counted")
        assert not liar.ended
        assert leader.dispatcher.snapshot() == before
        assert batch in leader.in_flight
        assert not leader.cluster.registry["liar"].loaded


async def test_a_batch_cannot_have_run_before_it_was_ordered(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, (agent,) = await crowd.serving(process.port)
        await gateway.submit(1)
        batch = (await gateway.dispatched(1)).batch_id
        await agent.send(report(batch, compute_ns=3_600_000 * MS))
        await until(lambda: counted(process, "agent") == 1, "it is counted")
        await agent.send(start(batch, started_ago_ns=3_600_000 * MS))
        await until(lambda: counted(process, "agent") == 2, "it is counted again")
        assert batch in process.leader(0).in_flight
        await agent.report(batch, 0)
        await until(lambda: batch not in process.leader(0).in_flight, "the truth is believed")


async def test_a_gateway_speaks_for_its_own_batches_only(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        liar = await crowd.gateway(process.port, "liar")
        await gateway.submit(1)
        batch = (await gateway.dispatched(1)).batch_id
        for number, said in enumerate(
            (
                scheduler_pb2.DeliveryFailed(batch_id=batch, failure=failure("good")),
                scheduler_pb2.DeliveryFailed(batch_id=batch + 99, failure=failure("good")),
            )
        ):
            await liar.send(FromGateway(delivery_failed=said))
            await until(lambda n=number: counted(process, "gateway") == n + 1, "it is counted")
        assert batch in process.leader(0).in_flight
        blames = scheduler_pb2.DeliveryFailed(batch_id=batch, failure=failure("another"))
        await gateway.send(FromGateway(delivery_failed=blames))
        await until(lambda: counted(process, "gateway") == 3, "it is counted")
        assert batch in process.leader(0).in_flight


async def test_texts_are_as_many_as_the_rows_of_their_request(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        run = scheduler_pb2.TextRows
        await gateway.submit(1, rows=3, texts=[run(rows=1, tokens=4), run(rows=1, tokens=9)])
        await until(lambda: counted(process, "gateway") == 1, "it is counted")
        await gateway.submit(2, rows=3, texts=[run(rows=1, tokens=4), run(rows=2, tokens=9)])
        assert (await gateway.dispatched(2)).batch_rows == 3


async def test_an_agent_holds_nothing_that_was_never_given_out(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway = await serving(process, crowd)
        batches = [scheduler_pb2.BatchInAgent(batch_id=(1 << 40) + 50, remaining_ns=10**15)]
        sessions = [scheduler_pb2.SessionInAgent(session_id=1 << 62)]
        for number, script in enumerate(
            (AgentScript(batches=batches), AgentScript(sessions=sessions))
        ):
            error = await ended(await crowd.agent(process.port, f"liar-{number}", script))
            assert isinstance(error, InvalidMessage)
            assert "was never given out" in error.message
        for number in range(60):  # past the id that was claimed
            await gateway.submit(number)
            await gateway.dispatched(number)


# ---- anything at all ----


class World:
    """A scheduler, a gateway and an agent that behave, on a loop of their own."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.folder = folder
        self.crowd = Crowd()
        self.requests = 0

    def __enter__(self) -> World:
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self.runner.close()

    async def _start(self) -> None:
        add_model(self.folder / "models")
        self.redis = EmbeddedRedis(self.folder / "redis")
        await self.redis.start()
        self.process = SchedulerProcess(
            settings_of(self.folder, self.redis.url, silence_s=600.0, lease_s=60.0)
        )
        await self.process.start()
        self.gateway = await self.crowd.gateway(self.process.port, "good-gateway")
        self.agent = await self.crowd.agent(self.process.port, "good")
        await until(lambda: self.gateway.ready, "the model is served")

    async def _stop(self) -> None:
        await self.crowd.close()
        await self.process.stop()
        await self.redis.stop()

    async def tell(self, client: Any, *said: Any) -> None:
        """Connects as a peer, says something, and waits until it was heard."""
        try:
            await client.start()
            for message in said:
                await client.send(message)
            for _ in range(200):
                if client.ended:
                    break
                await asyncio.sleep(0.001)
            if isinstance(client.error, InternalError):
                raise AssertionError(f"a handler fell over {said}: {client.error.message}")
        finally:
            await client.close()

    async def serves(self) -> None:
        self.requests += 1
        await self.gateway.submit(self.requests)
        batch = await self.gateway.dispatched(self.requests)
        assert batch.route[0].agent_id == "good"
        await self.agent.report(batch.batch_id, 0)
        await self.gateway.finished(self.requests)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


ANYTHING = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_nothing_an_agent_says_harms_others(world: World) -> None:
    names = iter(range(10**9))

    @ANYTHING
    @given(messages(scheduler_pb2.AgentMessage.DESCRIPTOR))
    def attack(message: Any) -> None:
        liar = FakeAgent(world.process.port, f"l{next(names)}", AgentScript(memory_bytes=1))
        world.run(world.tell(liar, message))
        world.run(world.serves())

    attack()


def test_nothing_an_agent_says_at_first_harms_others(world: World) -> None:
    @ANYTHING
    @given(messages(scheduler_pb2.AgentHello.DESCRIPTOR))
    def attack(hello: Any) -> None:
        liar = FakeAgent(world.process.port, "liar")
        liar._hello = (scheduler_pb2.AgentMessage(hello=hello),)
        world.run(world.tell(liar))
        world.run(world.serves())

    attack()


def test_nothing_a_gateway_says_harms_others(world: World) -> None:
    names = iter(range(10**9))

    @ANYTHING
    @given(messages(scheduler_pb2.GatewayMessage.DESCRIPTOR))
    def attack(message: Any) -> None:
        liar = FakeGateway(world.process.port, f"l{next(names)}")
        world.run(world.tell(liar, message))
        world.run(world.serves())

    attack()
