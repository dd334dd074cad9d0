"""Windows of a real scheduler: granted, extended and revoked over real streams, and lied about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from scheduler_harness import MS, AgentScript, Crowd, FakeAgent, FakeGateway, scheduler, until

Configured = Callable[..., SchedulerSettings]
WHOLE = {
    "models": [
        {
            "name": "toy",
            "pipelines": [{"batch": 2, "partitions": [{"blocks": [0, 4], "agents": ["agent-0"]}]}],
        }
    ]
}
LONG = {"dispatch_window_ms": 1000.0, "max_linger_ms": 0.0}
"""Windows of a tenth of a request's time: longer than messages take on a busy machine."""


class WindowGateway(FakeGateway):
    """A gateway that asks for one request after the other, and takes windows."""

    def __init__(self, port: int, name: str = "gateway-0") -> None:
        super().__init__(port, name)
        self._hello[0].hello.takes_windows = True
        self.numbers = iter(range(1, 1 << 20))

    async def one_at_a_time(self, agent: FakeAgent, requests: int = 3) -> None:
        for _ in range(requests):
            number = next(self.numbers)
            await self.submit(number, budget_ns=10_000 * MS)
            order = await self.dispatched(number)
            await agent.report(order.batch_id, 0)
            await self.finished(number)

    async def granted(self, agent: FakeAgent) -> scheduler_pb2.GrantWindow:
        await self.one_at_a_time(agent)
        grants = await until(lambda: self.all("grant_window"), "a window is granted")
        return grants[-1]

    async def report(self, window: scheduler_pb2.GrantWindow, number: int, **said: Any) -> None:
        known = {"window_id": window.window_id, "number": number}
        known["first_batch_id"] = window.first_batch_id
        report = scheduler_pb2.WindowReport(**{**known, **said})
        await self.send(scheduler_pb2.GatewayMessage(window_report=report))


@pytest.fixture
async def process(configured: Configured) -> AsyncIterator[SchedulerProcess]:
    async with scheduler(configured(WHOLE, **LONG)) as started:
        yield started


async def served(
    process: SchedulerProcess, crowd: Crowd, script: AgentScript | None = None
) -> tuple[WindowGateway, FakeAgent]:
    agent = await crowd.agent(process.port, "agent-0", script)
    gateway = WindowGateway(process.port)
    await crowd._start(gateway)
    await until(lambda: gateway.ready, "the model is served")
    return gateway, agent


def sample(process: SchedulerProcess, name: str, **labels: str) -> float:
    return process._metrics.registry.get_sample_value(f"catenary_{name}", labels) or 0.0


async def test_a_window_is_granted_and_its_use_counts(
    process: SchedulerProcess, crowd: Crowd
) -> None:
    gateway, agent = await served(process, crowd)
    window = await gateway.granted(agent)
    (hop,) = window.hops
    assert (hop.hop.agent_id, hop.hop.last_block) == ("agent-0", 4)
    assert list(hop.compute_ns) == [2 * MS, 2 * MS]
    assert 0 < hop.ends_after_ns <= 1000 * MS
    assert window.first_batch_id > window.window_id
    await agent.report(window.first_batch_id, 0)
    leader = process.leader()
    batch = window.first_batch_id
    await until(lambda: leader.timelines.entry(batch), "the timeline shows its batch")
    await gateway.report(window, 1, rows=[1, 2], requests=2, renew=True)
    (extended,) = await until(lambda: gateway.all("extend_window"), "it is extended")
    assert (extended.window_id, extended.number) == (window.window_id, 1)
    await gateway.report(window, 2, busy_ns=[0])
    await until(lambda: window.window_id not in leader.in_flight, "it is over")
    await until(lambda: sample(process, "window_batches_total") == 2, "its batches are counted")
    assert sample(process, "dispatch_windows_total", outcome="granted") == 1
    assert sample(process, "dispatch_windows_total", outcome="extended") == 1


async def test_another_gateway_ends_a_window(process: SchedulerProcess, crowd: Crowd) -> None:
    gateway, agent = await served(process, crowd)
    other = await crowd.gateway(process.port, "gateway-1")
    window = await gateway.granted(agent)
    await other.submit(1)
    (revoked,) = await until(lambda: gateway.all("revoke_window"), "it is revoked")
    assert (revoked.window_id, revoked.lost) == (window.window_id, False)
    await gateway.report(window, 1)
    await other.dispatched(1)


async def test_a_window_goes_with_its_agent_and_late_rows_are_dispatched_again(
    process: SchedulerProcess, crowd: Crowd
) -> None:
    gateway, agent = await served(process, crowd)
    window = await gateway.granted(agent)
    await agent.close()
    (revoked,) = await until(lambda: gateway.all("revoke_window"), "it is revoked")
    assert revoked.lost
    number = next(gateway.numbers)
    rows = scheduler_pb2.InFlight(batch_id=window.first_batch_id, rows=1, expected_after_ns=MS)
    await gateway.submit(number, in_flight=[rows], budget_ns=30_000 * MS)
    await crowd.agent(process.port, "agent-0")
    order = await gateway.dispatched(number)
    assert order.batch_id != window.first_batch_id


async def test_gateways_that_do_not_know_windows_get_none(
    process: SchedulerProcess, crowd: Crowd
) -> None:
    _, agent = await served(process, crowd)
    old = WindowGateway(process.port, "gateway-old")
    old._hello[0].hello.takes_windows = False
    await crowd._start(old)
    await old.one_at_a_time(agent, 5)
    assert old.all("grant_window") == []


@pytest.mark.parametrize(
    ("lie", "field"),
    [
        ({"window_id": 1 << 60}, "window_id"),
        ({"first_batch_id": 1}, "first_batch_id"),
        ({"rows": [1] * 300, "requests": 1}, "first_batch_id"),
        ({"rows": [3]}, "rows"),
        ({"rows": [1], "requests": 2}, "requests"),
    ],
)
async def test_a_gateway_that_lies_about_a_window_is_accused(
    process: SchedulerProcess, crowd: Crowd, lie: dict[str, Any], field: str
) -> None:
    gateway, agent = await served(process, crowd)
    window = await gateway.granted(agent)
    await gateway.report(window, 1, **lie)
    await until(
        lambda: sample(process, "invalid_messages_total", role="gateway") == 1,
        f"{field} is not believed",
    )
    assert gateway.error is None


async def test_windows_of_others_and_of_agents_off_the_path_are_not_believed(
    process: SchedulerProcess, crowd: Crowd
) -> None:
    gateway, agent = await served(process, crowd)
    thief = await crowd.gateway(process.port, "gateway-1")
    stranger = await crowd.agent(process.port, "agent-1")
    await until(lambda: stranger.all("welcome"), "it is welcome")
    window = await gateway.granted(agent)
    await WindowGateway.report(thief, window, 1)  # type: ignore[arg-type]
    await until(lambda: sample(process, "invalid_messages_total", role="gateway") == 1, "accused")
    await stranger.report(window.first_batch_id, 0)
    await until(lambda: sample(process, "invalid_messages_total", role="agent") == 1, "accused")


async def test_the_leader_after_this_one_knows_no_window_and_books_its_time_in_the_end(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(WHOLE, **LONG)) as first:
        gateway, agent = await served(first, crowd)
        window = await gateway.granted(agent)
        await asyncio.sleep(0.05)  # the book is written behind
    async with scheduler(configured(WHOLE, **LONG)) as second:
        await until(lambda: second.leads, "the next one leads")
        script = AgentScript(epoch=1, partitions=list(agent.loaded.values()))
        gateway, agent = await served(second, crowd, script)
        await gateway.report(window, 1, rows=[1], requests=1)
        number = next(gateway.numbers)
        await gateway.submit(number)
        order = await gateway.dispatched(number)
        assert order.epoch > window.epoch
        assert gateway.error is None


def failure() -> common_pb2.Failure:
    return common_pb2.Failure(reason="INTERNAL", message="no", retryable=True)


async def test_a_failed_batch_ends_its_window(process: SchedulerProcess, crowd: Crowd) -> None:
    gateway, agent = await served(process, crowd)
    window = await gateway.granted(agent)
    said = scheduler_pb2.BatchFailed(batch_id=window.first_batch_id, failure=failure())
    await agent.send(scheduler_pb2.AgentMessage(batch_failed=said))
    (revoked,) = await until(lambda: gateway.all("revoke_window"), "it is revoked")
    assert not revoked.lost
