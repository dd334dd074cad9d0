"""Derives the number of agents that the cluster should have, and drains those it can do without.

`scheduler/catenary_scheduler/scaling` decides how many workers (chains) every model should have.
This module turns those numbers into a number of agents. Whoever starts and stops agents
(`catenaryd up --max-agents`, KEDA, a person) reads it from `Admin.WatchScaling` or from the
metrics. Surplus agents are drained one after the other, the emptiest first: new plans leave them
out, their sessions run to the end, and once they hold nothing they are reported as drained. When
more agents are wanted, an agent that is being drained is taken back first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.agents.registry import is_draining, staying
from catenary_scheduler.cluster.draining import Draining
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.events import (
    Event,
    LatencyRefitted,
    Scale,
)
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.runtime.session_outcomes import SessionOutcomes
from catenary_scheduler.runtime.statistics_collector import (
    StatisticsCollector,
    WorkerDeps,
    model_workers_of,
    workers_of,
)
from catenary_scheduler.scaling import (
    ModelScaling,
    ScalingPolicy,
    agents_wanted,
    last_of_each,
    next_to_go,
)
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import StoredPlan
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import ModelPlan
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_TICK_NS = NANOSECONDS_PER_SECOND
_STOPPED_NS = 10 * NANOSECONDS_PER_SECOND
"""A drained agent that is still connected after this time may be used again: nobody is about to
stop it."""
_DIGITS = 2
"""Number of decimals of rates and ratios in an advice, which is sent whenever it differs from the
previous one."""


@dataclass(frozen=True, slots=True)
class ScalingDeps:
    """The parts that the autoscaler reads, besides the workers of models, and those it acts on."""

    workers: WorkerDeps
    availability: Availability
    planner: Planner
    draining: Draining
    objectives: Callable[[ModelKey], TokenObjectives | None]
    """Returns the objectives of requests of a model that name none; None if the model has none
    either."""
    note: Callable[[str, dict[str, str]], None]
    """Enters an event, by its kind and its facts, into the event stream."""


class Autoscaler:
    """The autoscaler of one term.

    Attributes:
        models: The scaling decisions of each model that generates text.
        outcomes: Tells these of their sessions, if it is told of events.
    """

    observes = (LatencyRefitted,)
    table = RedisTable.PLAN

    def __init__(self, deps: ScalingDeps, policy: ScalingPolicy) -> None:
        self._deps = deps
        self._settings = deps.workers.settings
        self._cluster = deps.workers.cluster
        self._policy = policy
        self.models: dict[ModelKey, ModelScaling] = {}
        self._records: dict[str, dict[str, object]] = {}
        self._statistics = StatisticsCollector(deps.workers)
        self.outcomes = SessionOutcomes(self._scaling_of, self._usual, deps.planner.answered)
        self._tick_ns: Nanoseconds = 0
        self._wanted = 0
        self._drains: dict[AgentId, Nanoseconds] = {}
        """Agents that are being drained, with the time at which they were told that they are
        drained; 0: not yet."""
        self._changed = asyncio.Event()
        self._advice: admin_pb2.ScalingAdvice | None = None

    # ---- what happened ----

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Notes how fast the chains of a model are by their refitted latencies."""
        assert isinstance(event, LatencyRefitted)
        self._statistics.refitted(event)

    def tick(self, now: Nanoseconds) -> None:
        """Decides about every model and about the agents, at most once a second."""
        if now - self._tick_ns < _TICK_NS:
            return
        self._tick_ns = now
        plans = self._statistics.plans()
        for plan in plans:
            scaling = self._scaling_of(plan.model)
            order = scaling.decide(self._statistics.of(plan), now)
            if order is not None:
                self._ordered(order)
        self._count_agents(plans)
        if self._limit:
            self._move(plans)
        self._tell_drained()
        self._advice = None
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- what is known ----

    def advice(self) -> admin_pb2.ScalingAdvice:
        """Returns the scaling advice of the last decision."""
        if self._advice is None:
            self._advice = self._make_advice()
        return self._advice

    def attainment(self, model: ModelKey, now: Nanoseconds) -> float:
        """Returns the share of a model's last sessions that met their objectives.

        The share is -1 if there are no such sessions.
        """
        scaling = self.models.get(model)
        return scaling.attainment_of_any(now) if scaling is not None else -1.0

    def _make_advice(self) -> admin_pb2.ScalingAdvice:
        now = self._tick_ns
        advice = admin_pb2.ScalingAdvice(
            agents_wanted=self._wanted or self._agents_now,
            agents_now=self._agents_now,
            drains_agents=bool(self._limit),
        )
        for plan in self._statistics.plans():
            scaling = self._scaling_of(plan.model)
            advice.models.add(
                model=plan.model.name,
                version=plan.model.version,
                workers_wanted=scaling.wanted or len(workers_of(plan)),
                workers_now=len(workers_of(plan)),
                arrivals_per_s=round(scaling.rates.rate(now), _DIGITS),
                attainment_ratio=round(scaling.attainment(now), _DIGITS),
                reason=scaling.reason,
            )
        for agent, record in sorted(self._cluster.registry.items()):
            if record.session is not None and is_draining(agent, self._deps.availability):
                advice.retiring.add(agent_id=agent, drained=self._deps.draining.is_idle(agent))
        return advice

    async def changed(self, timeout_s: float) -> None:
        """Returns after the next decision, or after `timeout_s` seconds."""
        waiter = self._changed
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter.wait()
        except TimeoutError:
            return

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges that outside autoscalers read."""
        now = self._tick_ns
        metrics.agents_wanted.set(self._wanted or self._agents_now)
        metrics.agents_now.set(self._agents_now)
        for plan in self._statistics.plans():
            scaling, name = self._scaling_of(plan.model), plan.model.name
            metrics.workers_wanted.labels(name).set(scaling.wanted or len(workers_of(plan)))
            metrics.workers.labels(name).set(len(workers_of(plan)))
            metrics.session_rate.labels(name).set(scaling.rates.rate(now))
            metrics.session_attainment.labels(name).set(scaling.attainment(now))
        metrics.keep_scaled({plan.model.name for plan in self._statistics.plans()})

    # ---- Redis ----

    def records(self) -> Fields:
        """Returns what was learned about every model, for the next leader."""
        if not self.models:
            return {}
        learned = {str(key): model.to_record() for key, model in self.models.items()}
        return {"scaling": encode_document({**self._records, **learned})}

    def restore(self, plan: StoredPlan) -> None:
        """Takes over what an earlier scheduler learned about every model."""
        self._records = {model: dict(record) for model, record in plan.scaling.items()}

    # ---- inside ----

    @property
    def _limit(self) -> int:
        """Largest number of agents; 0: none is drained here, as somebody else decides which go."""
        return self._settings.max_agents

    @property
    def _agents_now(self) -> int:
        return len(staying(self._cluster.registry, self._deps.availability))

    def _usual(self, model: ModelKey) -> TokenObjectives | None:
        return self._deps.objectives(model)

    def _scaling_of(self, model: ModelKey) -> ModelScaling:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelScaling(model, self._policy)
            record = self._records.pop(str(model), None)
            if record is not None:
                try:
                    found.restore(record)
                except (ValueError, TypeError, KeyError) as error:
                    _log.warning("stored_scaling_unreadable", error=str(error))
        return found

    def _ordered(self, order: Scale) -> None:
        statistics = {"model": str(order.model), "workers": str(order.workers), "why": order.reason}
        _log.info("scale", **statistics)
        self._deps.note("scale", statistics)

    def _count_agents(self, plans: Iterable[ModelPlan]) -> None:
        settings = self._settings
        workers_of_models = [
            model_workers_of(plan, self._scaling_of(plan.model).wanted) for plan in plans
        ]
        wanted = (
            agents_wanted(workers_of_models, len(self._statistics.others(workers_of_models)))
            if workers_of_models
            else self._agents_now
        )
        wanted = max(wanted, settings.min_agents, 1)
        if self._limit:
            wanted = min(wanted, max(self._limit, settings.min_agents))
        if wanted != self._wanted:
            self._wanted = wanted
            self._deps.note("agents_wanted", {"agents": str(wanted)})

    def _move(self, plans: list[ModelPlan]) -> None:
        """Drains one surplus agent, or takes back agents that are being drained."""
        deps, cluster = self._deps, self._cluster
        registry = cluster.registry
        for agent in [a for a in self._drains if a not in registry or registry[a].session is None]:
            del self._drains[agent]
        if self._agents_now < self._wanted:
            self._take_back()
            return
        is_calm = not cluster.is_switching and not deps.planner.is_thinking
        if self._agents_now <= self._wanted or not plans or not is_calm:
            return
        workers_of_models = {
            plan.model: model_workers_of(plan, self._scaling_of(plan.model).wanted)
            for plan in plans
        }
        pinned = self._statistics.others(workers_of_models.values())
        able = {record.agent.agent_id for record in staying(registry, deps.availability)}
        if self._settings.retire_by_ordinal:
            able &= last_of_each(able)
        able -= pinned
        tokens = deps.workers.dispatcher.chained.tokens_by_agent()
        going = next_to_go(workers_of_models, tokens, able)
        if going is not None:
            self._drains[going] = 0
            sessions = deps.workers.live.count_at(going)
            deps.note("agent_retires", {"agent": going, "sessions": str(sessions)})
            deps.draining.begin(going)

    def _take_back(self) -> None:
        for agent, told_ns in list(self._drains.items()):
            if self._agents_now >= self._wanted:
                return
            if told_ns and self._tick_ns - told_ns < _STOPPED_NS:
                continue  # it may be about to be stopped
            del self._drains[agent]
            self._deps.note("agent_stays", {"agent": agent})
            for scaling in self.models.values():
                scaling.reclaimed()
            self._deps.draining.take_back(agent)

    def _tell_drained(self) -> None:
        for agent, told_ns in self._drains.items():
            if not told_ns and self._deps.draining.is_idle(agent):
                self._drains[agent] = self._tick_ns
                self._deps.draining.tell_drained(agent)
