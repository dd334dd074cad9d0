"""A leader has links measured, goes by them, shows them, and leaves them to the next leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.admin.status import status_of
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.telemetry.metrics import Metrics
from chain_harness import RING, serving
from scheduler_harness import AgentScript, Crowd, FakeAgent, crash, scheduler, until

Configured = Callable[..., SchedulerSettings]
Measured = scheduler_pb2.LinkMeasured
MS = 1_000_000
RATE = 6_250_000


def scripts() -> list[AgentScript]:
    return [AgentScript(address=f"10.0.0.{number}:8004") for number in (5, 6)]


def orders(agents: list[FakeAgent]) -> list[tuple[int, scheduler_pb2.MeasureLinkTo]]:
    return [
        (number, order)
        for number, agent in enumerate(agents)
        for order in agent.all("measure_link")
    ]


async def answer(agent: FakeAgent, order: scheduler_pb2.MeasureLinkTo, **said: Any) -> None:
    known = {"outcome": Measured.OUTCOME_MEASURED, "number": order.number, **said}
    await agent.send(scheduler_pb2.AgentMessage(link_measured=Measured(**known)))


async def answered(agents: list[FakeAgent], **said: Any) -> list[tuple[int, str]]:
    """Answers the orders for both links as they come; returns who was asked for which peer."""
    found: list[tuple[int, str]] = []
    for number in range(2):
        await until(lambda number=number: len(orders(agents)) > number, "the next order")  # type: ignore[misc]
        asked = {(who, order.peer_id): order for who, order in orders(agents)}
        ((who, peer),) = asked.keys() - set(found)
        await answer(agents[who], asked[who, peer], **said)
        found.append((who, peer))
    return found


def budgeted(leader: LeaderRuntime) -> int:
    rate: int = leader.dispatcher.chained._table.migration_budget.rate("agent-0>agent-1")
    return rate


def booked(leader: LeaderRuntime) -> set[int]:
    agents = leader.dispatcher.pooled._state.agents
    return {agent.link_bytes_per_second for agent in agents.values()}


async def test_both_directions_are_measured_and_gone_by_also_by_the_next_leader(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as old:
        _, agents = await serving(old, crowd, *scripts())
        leader = old.leader()
        assert booked(leader) == {10**9}
        found = await answered(agents, round_trip_ns=60 * MS, bytes_per_second=RATE)
        assert sorted(found) == [(0, "agent-1"), (1, "agent-0")]
        await until(lambda: len(leader.measured.links.known.figures) == 2, "both are known")
        assert budgeted(leader) == RATE
        assert booked(leader) == {RATE}
        links = status_of(ClusterView(leader)).links
        assert [(each.source_server_id, each.target_server_id) for each in links] == [
            ("agent-0", "agent-1"),
            ("agent-1", "agent-0"),
        ]
        assert {(each.round_trip_ns, each.bytes_per_second) for each in links} == {(60 * MS, RATE)}
        assert all(each.age_ns < 600 * 10**9 for each in links)
        metrics = Metrics()
        leader.link_measurements.export(metrics)
        shown, labels = (
            metrics.registry.get_sample_value,
            {"source": "agent-0", "target": "agent-1"},
        )
        assert shown("catenary_server_link_bytes_per_second", labels) == RATE
        assert shown("catenary_server_link_round_trip_seconds", labels) == 0.06
        await leader.write_behind.flush()
        await crash(old)
    async with scheduler(generating(scheduler_id="scheduler-1")) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        _, agents = await serving(new, crowd, *scripts())
        assert budgeted(new.leader()) == RATE
        assert booked(new.leader()) == {RATE}
        beats = len(agents[0].all("heartbeat"))
        await until(lambda: len(agents[0].all("heartbeat")) > beats + 30, "three seconds pass")
        assert orders(agents) == []


async def test_answers_nobody_waits_for_and_empty_ones_count_for_nothing(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as process:
        _, agents = await serving(process, crowd, *scripts())
        leader = process.leader()
        await until(lambda: bool(orders(agents)), "an order")
        ((who, order),) = orders(agents)
        assert 0 < order.most_bytes <= 64 << 20
        for agent, number in ((agents[1 - who], order.number), (agents[who], order.number + 1)):
            said = Measured(
                number=number,
                outcome=Measured.OUTCOME_MEASURED,
                round_trip_ns=MS,
                bytes_per_second=1,
            )
            await agent.send(scheduler_pb2.AgentMessage(link_measured=said))
        await answer(agents[who], order, round_trip_ns=0, bytes_per_second=0)
        await until(lambda: len(orders(agents)) == 2, "the next order")
        assert leader.measured.links.known.figures == {}
        assert booked(leader) == {10**9}


async def test_agents_that_nobody_reaches_from_elsewhere_are_not_asked(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as process:
        _, agents = await serving(process, crowd, AgentScript(), AgentScript())
        beats = len(agents[0].all("heartbeat"))
        await until(lambda: len(agents[0].all("heartbeat")) > beats + 30, "three seconds pass")
        assert orders(agents) == []
