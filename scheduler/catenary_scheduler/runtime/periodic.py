"""What a term does because time passed: heartbeats, silence, deadlines of those who wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.hosting import agents_by_state
from catenary_scheduler.cluster.draining import begin_draining, tell_drained
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import LeaderRuntime

_log = get_logger(__name__)
_TURN_S = 0.05
_SAY_AGAIN_S = 60.0
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
    "begun": "packing_moves",
    "full": "packing_full",
    "harmful": "packing_harmful",
    "worthless": "packing_worthless",
    "deferred": "packing_deferred",
}
_MIGRATIONS = {"kv": "kv_moves", "tokens": "tokens_moves"}
_MIGRATION_FAILURES = {
    reason: f"failed_moves_{reason}" for reason in ("deadline", "agent", "lost", "closed", "over")
}


async def run_periodic_tasks(leader: LeaderRuntime, metrics: Metrics) -> None:
    """Runs until cancelled."""
    settings = leader.settings
    heartbeat_s = reconcile_s = deployments_s = 0.0
    told: dict[str, int] = {}
    duties = _Duties(leader)
    retrying: asyncio.Task[None] | None = None
    try:
        while True:
            now_s = time.monotonic()
            for duty in _EVERY_TURN:
                duties.do(duty)
            if now_s >= heartbeat_s:
                heartbeat_s = now_s + settings.heartbeat_s
                for duty in _EVERY_HEARTBEAT:
                    duties.do(duty)
                duties.do(lambda each: _show(each, metrics))
                told = _count(leader.dispatcher.statistics(), told, metrics)
            is_retried = retrying is not None and not retrying.done()
            if now_s >= deployments_s and leader.deployments.problems and not is_retried:
                deployments_s = now_s + _RETRY_DEPLOYMENTS_S
                # Beside the rest: of a large model every byte is read, and heartbeats go on.
                retrying = asyncio.create_task(_retry_deployments(leader), name="retry-deployments")
            if now_s >= reconcile_s:
                reconcile_s = now_s + _RECONCILE_S
                for duty in _EVERY_QUARTER_SECOND:
                    duties.do(duty)
            await asyncio.sleep(_TURN_S)
    finally:
        if retrying is not None:
            retrying.cancel()


async def _retry_deployments(leader: LeaderRuntime) -> None:
    try:
        await leader.deployments.retry()
    except Exception:
        _log.error("deployments_not_retried", exc_info=True)


class _Duties:
    """Does things one by one: if one cannot be done, for whatever reason, all others still are."""

    def __init__(self, leader: LeaderRuntime) -> None:
        self._leader = leader
        self._said_s: dict[str, float] = {}
        """When each kind of failure was logged last."""

    def do(self, duty: Callable[[LeaderRuntime], None]) -> None:
        """Does one of them; a failure that goes on is logged once a minute."""
        try:
            duty(self._leader)
        except Exception as error:
            kind, now_s = f"{duty.__name__}: {error!r}"[:200], time.monotonic()
            if now_s - self._said_s.get(kind, -math.inf) >= _SAY_AGAIN_S:
                self._said_s = {k: s for k, s in self._said_s.items() if now_s - s < _SAY_AGAIN_S}
                self._said_s[kind] = now_s
                _log.error("housekeeping_failed", duty=duty.__name__, exc_info=True)


def _beat(leader: LeaderRuntime) -> None:
    beat = scheduler_pb2.Heartbeat()
    leader.gateways.broadcast(scheduler_pb2.SchedulerToGatewayMessage(heartbeat=beat))
    leader.agents.broadcast(
        scheduler_pb2.SchedulerToAgentMessage(epoch=leader.epoch, heartbeat=beat)
    )


def _sweep(leader: LeaderRuntime) -> None:
    now_s = time.monotonic()
    leader.gateways.sweep(now_s, leader.settings.silence_s)
    leader.agents.sweep(now_s, leader.settings.silence_s)


def _expire(leader: LeaderRuntime) -> None:
    leader.in_flight.expire(now_ns())
    leader.live.expire()
    leader.utilisation.next_round(time.monotonic())


def _drain(leader: LeaderRuntime) -> None:
    for agent in leader.drains.due():
        begin_draining(leader, agent)
    for agent in leader.drains.done():
        tell_drained(leader, agent)


def _expire_waiting(leader: LeaderRuntime) -> None:
    leader.expire_waiting()


def _look_at_agents(leader: LeaderRuntime) -> None:
    leader.slow_and_silent.look()
    leader.times.fade(now_ns())


def _heed_availability(leader: LeaderRuntime) -> None:
    """Tells the dispatcher what impaired or cleared an agent, whoever said so."""
    leader.heed_availability()


def _scale(leader: LeaderRuntime) -> None:
    leader.autoscaler.tick(now_ns())


def _audit(leader: LeaderRuntime) -> None:
    leader.audits.tick(now_ns())


def _reconcile(leader: LeaderRuntime) -> None:
    leader.peers.sweep(time.monotonic())
    leader.cluster.reconcile(time.monotonic())


_EVERY_TURN = (_expire_waiting, _look_at_agents, _heed_availability, _scale, _audit)
_EVERY_HEARTBEAT = (_beat, _sweep, _expire)
_EVERY_QUARTER_SECOND = (_reconcile, _drain)


def _show(leader: LeaderRuntime, metrics: Metrics) -> None:
    metrics.redis_connected.set(leader.write_behind.connected)
    metrics.redis_pending.set(leader.unwritten)
    metrics.batches_in_flight.set(len(leader.in_flight))
    metrics.live_reservations.set(len(leader.dispatcher.snapshot()))
    present = [g for g in leader.gateways.gateways.values() if g.session is not None]
    metrics.gateways.set(len(present))
    for state, count in agents_by_state(leader.cluster.registry, leader.availability).items():
        metrics.agents.labels(state).set(count)
    for impairment in Impairment:
        impaired = (
            leader.availability.impaired_by(impairment) & leader.availability.connected_agents
        )
        metrics.impaired_agents.labels(impairment.name.lower()).set(len(impaired))
    metrics.stragglers.set(len(leader.availability.impaired_by(Impairment.STRAGGLING)))
    for model in leader.deployments.ready:
        queued = leader.waiting.count(model) + leader.dispatcher.chained.queued(model)
        metrics.queued_requests.labels(model.name).set(queued)
    _show_chains(leader, metrics)
    leader.sessions.latency.show(metrics)
    leader.transfer_rates.show(metrics, leader.cluster.registry)
    leader.autoscaler.show(metrics)
    for agent, record in leader.cluster.registry.items():
        ratio = leader.slowdowns.ratio(agent, now_ns()) if record.session is not None else 0.0
        metrics.agent_slowdown.labels(agent).set(ratio)


def show_nothing(metrics: Metrics) -> None:
    """Takes back what only a leader knows, so that sums over all schedulers are right."""
    for gauge in (
        metrics.redis_pending,
        metrics.batches_in_flight,
        metrics.live_reservations,
        metrics.gateways,
        metrics.sessions_moving,
        metrics.sessions_stray,
        metrics.stragglers,
        metrics.fragile_models,
        metrics.packed_chains,
        metrics.packed_chains_in_use,
        metrics.agents_wanted,
        metrics.agents_now,
    ):
        gauge.set(0)
    for labelled in (
        metrics.agents,
        metrics.impaired_agents,
        metrics.agent_slowdown,
        metrics.queued_requests,
        metrics.link_rate,
        metrics.link_utilisation,
    ):
        labelled.clear()
    metrics.keep_chains(set())
    metrics.keep_scaled(set())


def _show_chains(leader: LeaderRuntime, metrics: Metrics) -> None:
    active, sessions = leader.cluster.active, leader.live.by_chain()
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
    metrics.circuits_opened.inc(since("opened_circuits"))
    metrics.requests_to_blame.inc(since("failed_requests"))
    metrics.sessions_stalled.inc(since("stalled_sessions"))
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
