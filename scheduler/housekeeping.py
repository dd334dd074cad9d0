"""What a term does because time passed: heartbeats, silence, deadlines of those who wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from scheduler.clock import now_ns
from scheduler.draining import begin_draining, tell_drained
from scheduler.fleet import agents_by_state
from services.domain.ids import NANOSECONDS_PER_SECOND
from services.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from scheduler.term import Term

_TURN_S = 0.05
_RECONCILE_S = 0.25
_RETRY_DEPLOYMENTS_S = 5.0
_PLACEMENTS = {
    "placed": "placed_requests",
    "forced": "forced_placements",
    "inadmissible": "inadmissible_requests",
    "rebalanced": "rebalanced_sessions",
    "preempted": "preempted_sessions",
}
"""Label of the metric: counter of the dispatcher."""
_PACKING = {
    "begun": "packing_moves", "full": "packing_full", "harmful": "packing_harmful",
    "worthless": "packing_worthless", "deferred": "packing_deferred",
}  # fmt: skip
_MIGRATIONS = {"kv": "kv_moves", "tokens": "tokens_moves"}
_MIGRATION_FAILURES = {
    reason: f"failed_moves_{reason}" for reason in ("deadline", "agent", "lost", "closed", "over")
}


async def keep_house(term: Term, metrics: Metrics) -> None:
    """Runs until cancelled."""
    settings = term.settings
    heartbeat_s = reconcile_s = deployments_s = 0.0
    told: dict[str, int] = {}
    while True:
        now_s = time.monotonic()
        term.expire_waiting()
        term.stragglers.look()
        term.autoscaler.tick(now_ns())
        term.audits.tick(now_ns())
        if now_s >= heartbeat_s:
            heartbeat_s = now_s + settings.heartbeat_s
            _beat(term, now_s)
            _show(term, metrics)
            told = _count(term.dispatcher.statistics(), told, metrics)
        if now_s >= deployments_s and term.deployments.problems:
            deployments_s = now_s + _RETRY_DEPLOYMENTS_S
            await term.deployments.retry()
        if now_s >= reconcile_s:
            reconcile_s = now_s + _RECONCILE_S
            term.peers.sweep(now_s)
            term.cluster.reconcile(now_s)
            for agent in term.drains.due():
                begin_draining(term, agent)
            for agent in term.drains.done():
                tell_drained(term, agent)
        await asyncio.sleep(_TURN_S)


def _beat(term: Term, now_s: float) -> None:
    beat = scheduler_pb2.Heartbeat()
    term.gateways.broadcast(scheduler_pb2.SchedulerToGatewayMessage(heartbeat=beat))
    term.agents.broadcast(scheduler_pb2.SchedulerToAgentMessage(epoch=term.epoch, heartbeat=beat))
    term.gateways.sweep(now_s, term.settings.silence_s)
    term.agents.sweep(now_s, term.settings.silence_s)
    term.in_flight.expire(now_ns())
    term.live.expire()
    term.utilisation.next_round(now_s)


def _show(term: Term, metrics: Metrics) -> None:
    metrics.redis_connected.set(term.write_behind.connected)
    metrics.redis_pending.set(term.unwritten)
    metrics.batches_in_flight.set(len(term.in_flight))
    metrics.live_reservations.set(len(term.dispatcher.snapshot()))
    present = [g for g in term.gateways.gateways.values() if g.session is not None]
    metrics.gateways.set(len(present))
    for state, count in agents_by_state(term.cluster.roster).items():
        metrics.agents.labels(state).set(count)
    for model in term.deployments.ready:
        queued = term.waiting.count(model) + term.dispatcher.chained.queued(model)
        metrics.queued_requests.labels(model.name).set(queued)
    _show_chains(term, metrics)
    term.sessions.latency.show(metrics)
    term.boundaries.show(metrics, term.cluster.roster)
    term.autoscaler.show(metrics)
    for agent, record in term.cluster.roster.items():
        ratio = term.slowdowns.ratio(agent, now_ns()) if record.session is not None else 0.0
        metrics.agent_slowdown.labels(agent).set(ratio)


def show_nothing(metrics: Metrics) -> None:
    """Takes back what only a leader knows, so that sums over all schedulers are right."""
    for gauge in (
        metrics.redis_pending, metrics.batches_in_flight, metrics.live_reservations,
        metrics.gateways, metrics.sessions_moving, metrics.sessions_stray,
    ):  # fmt: skip
        gauge.set(0)
    for labelled in (metrics.agents, metrics.queued_requests):
        labelled.clear()
    metrics.keep_chains(set())


def _show_chains(term: Term, metrics: Metrics) -> None:
    active, sessions = term.cluster.active, term.live.by_chain()
    shown = set()
    for model in active.plan.models if active is not None else ():
        for number, chain in enumerate(model.chains):
            labels = model.model.name, str(number)
            shown.add(labels)
            metrics.chain_capacity.labels(*labels).set(chain.capacity)
            metrics.chain_in_flight.labels(*labels).set(sessions[chain.chain_id])
    metrics.keep_chains(shown)


def _count(now: dict[str, int], told: dict[str, int], metrics: Metrics) -> dict[str, int]:
    """Adds what the dispatcher counted since it was last asked; returns what is told now."""

    def since(name: str) -> int:
        return now.get(name, 0) - told.get(name, 0)

    metrics.reservation_drift.inc(since("drift_ns_sum") / NANOSECONDS_PER_SECOND)
    metrics.reservation_corrections.inc(since("corrections"))
    metrics.reservation_conflicts.inc(since("displaced_batches"))
    for outcome, name in _PLACEMENTS.items():
        metrics.placements.labels(outcome).inc(since(name))
    for outcome, name in _PACKING.items():
        metrics.packing_moves.labels(outcome).inc(since(name))
    metrics.packed_chains.set(now.get("packed_chains", 0))
    metrics.packed_chains_in_use.set(now.get("packed_chains_in_use", 0))
    for mode, name in _MIGRATIONS.items():
        metrics.migrations.labels(mode).inc(since(name))
    for reason, name in _MIGRATION_FAILURES.items():
        metrics.migration_failures.labels(reason).inc(since(name))
    metrics.sessions_moving.set(now.get("moving_sessions", 0))
    metrics.sessions_stray.set(now.get("stray_sessions", 0))
    if "theta_millionths" in now:
        metrics.placement_theta.set(now["theta_millionths"] / 1e6)
    return now
