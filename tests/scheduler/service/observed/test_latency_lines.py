"""What agents report becomes the lines of chains: in the plan, for the dispatcher, for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.dispatch.events import LatencyRefitted, PlanActivated
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.telemetry.metrics import Metrics
from chain_harness import chains, listening, serving
from scheduler_harness import (
    LLM,
    MS,
    AgentScript,
    Crowd,
    FakeAgent,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]

BLOCKS = 6
WAYS_NS = 500_000
TWO_HOPS = chains((4, [("agent-0", 0, 3, 0), ("agent-1", 3, 6, 3)]))


def report_of(first: int, last: int, lone_ns: int, steps: int = 100) -> scheduler_pb2.AgentMessage:
    """A report of steps of one session, and of nothing else."""
    key = scheduler_pb2.PartitionKey(
        model="llm", model_version="1", first_block=first, last_block=last
    )
    return scheduler_pb2.AgentMessage(
        generation_report=scheduler_pb2.GenerationReport(
            key=key,
            decode_steps=steps,
            decode_rows=steps,
            decode_context_tokens=10 * steps,
            decode_ns=steps * lone_ns,
            lone_steps=steps,
            lone_context_tokens=10 * steps,
            lone_ns=steps * lone_ns,
        )
    )


async def slower(agent: FakeAgent, first: int, last: int, lone_ns: int) -> None:
    for _ in range(20):
        await agent.send(report_of(first, last, lone_ns))


async def test_chains_have_the_lines_their_agents_measured(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan_file=None)) as process:
        script = AgentScript()
        await serving(process, crowd, script)
        active = process.leader().cluster.active
        assert active is not None
        (chain,) = active.plan.models[0].chains
        assert chain.lines is not None
        # The script measures one partition: blocks * (decode_ns, prefill_token_ns), nothing else.
        assert chain.lines.decode(1, 500) == script.decode_ns * BLOCKS
        assert chain.lines.prefill(10) == 10 * MS * BLOCKS + 2 * WAYS_NS
        assert chain.cache_tokens == chain.capacity * active.plan.models[0].session_tokens


async def test_a_slower_agent_changes_the_lines_of_its_chain(
    generating: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(generating()) as (process, stub):
        _, (agent,) = await serving(process, crowd, AgentScript())
        leader = process.leader()
        fed = listening(leader)
        await slower(agent, 0, BLOCKS, 200 * MS)

        def refits() -> list[LatencyRefitted]:
            return [event for event in fed if isinstance(event, LatencyRefitted)]

        await until(
            lambda: refits() and refits()[-1].lines[0][1].decode_lone_ns > 195 * MS, "refit"
        )
        last = refits()[-1]
        assert last.model == LLM
        ((hops, lines),) = last.lines
        active = leader.cluster.active
        assert active is not None
        (chain,) = active.plan.models[0].chains
        assert hops == chain.hops
        assert lines.decode(1, 500) == pytest.approx(200 * MS, rel=0.05)
        # The same plan again (a switch lets go of something) does not bring the old lines back.
        leader._callbacks.dispatch_by(active.plan)
        activated = next(e for e in reversed(fed) if isinstance(e, PlanActivated))
        assert activated.plan.models[0].chains[0].lines == lines
        (model,) = (await stub.GetStatus(admin_pb2.GetStatusRequest())).models
        assert model.chains[0].role == "mixed"
        assert model.chains[0].lines.decode_lone_ns == lines.decode_lone_ns
        assert model.chains[0].lines.prefill_error_ratio == -1.0
        assert 0.0 < model.chains[0].lines.decode_error_ratio < 20
        metrics = Metrics()
        leader.sessions.latency.export(metrics)
        page = generate_latest(metrics.registry).decode()
        assert 'coefficient="decode_lone_ns",model="llm"' in page
        assert 'catenary_latency_prediction_error_ratio{kind="decode",model="llm"}' in page


async def test_a_new_plan_begins_with_what_is_known_by_now(
    generating: Configured, crowd: Crowd, tmp_path: Any
) -> None:
    async with scheduler(generating()) as process:
        _, (agent,) = await serving(process, crowd, AgentScript())
        leader = process.leader()
        await slower(agent, 0, BLOCKS, 200 * MS)
        key = next(iter(leader.cluster.registry.values())).loaded
        partition = next(iter(key))

        def by_now() -> float:
            observed = leader.measured.observed_at(agent_id(leader), partition)
            return observed.cost.decode(1) if observed is not None else 0.0

        await until(lambda: by_now() > 195 * MS, "reports are in")
        active = leader.cluster.active
        assert active is not None
        before = active.plan.models[0].chains[0].service_ns
        leader.cluster._activator.activate(active.placement, lambda plan: plan)
        again = leader.cluster.active
        assert again is not None
        chain = again.plan.models[0].chains[0]
        assert chain.lines is not None
        assert chain.lines.decode(1, 0) == pytest.approx(200 * MS, rel=0.05)
        assert chain.service_ns > before


def agent_id(leader: LeaderRuntime) -> Any:
    return next(iter(leader.cluster.registry))


async def test_hops_of_a_ring_add_up_and_one_report_moves_all_of_it(
    generating: Configured, crowd: Crowd, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = generating(plan=TWO_HOPS)
    async with scheduler(settings) as process:
        script = AgentScript()
        _, agents = await serving(process, crowd, script, script)
        leader = process.leader()
        active = leader.cluster.active
        assert active is not None
        lines = active.plan.models[0].chains[0].lines
        assert lines is not None
        assert lines.decode(1, 0) == pytest.approx(
            script.decode_ns * BLOCKS + 2 * WAYS_NS, rel=1e-5
        )
        fed = listening(leader)
        await slower(agents[1], 3, 6, 300 * MS)

        def latest() -> float:
            refits = [event for event in fed if isinstance(event, LatencyRefitted)]
            return refits[-1].lines[0][1].decode(1, 0) if refits else 0.0

        expected = script.decode_ns * 3 + 300 * MS + 2 * WAYS_NS
        await until(lambda: abs(latest() / expected - 1) < 0.05, "the ring is slower")
