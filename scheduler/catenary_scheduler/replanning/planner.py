"""Decides what is served by which agents, where no plan file says it, and when to plan anew.

A pooled plan is made beside the event loop; until it is there the previous one stays in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.events import Event, SessionRequested
from catenary_scheduler.planning import DeployedModel, Placement
from catenary_scheduler.planning.live import SessionShape
from catenary_scheduler.planning.requirements import agents_of, without
from catenary_scheduler.replanning.agent_choice import AgentChoice
from catenary_scheduler.replanning.agent_stability import AgentStability, eligible, is_settled
from catenary_scheduler.replanning.changed_times import ChangedTimes
from catenary_scheduler.replanning.plan_builder import PlanBuilder
from catenary_scheduler.replanning.plan_request import BuiltPlan, PlanRequest
from catenary_scheduler.replanning.provenance import POOLED, PlanProvenance
from catenary_scheduler.scaling import LoadReplanning, SessionDemand, SessionLoad, objective_at
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Agent
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

_log = get_logger(__name__)
_FIRST_RETRY_S = 30.0
_LONGEST_RETRY_S = 600.0
_LEAST_GAIN = 0.05
"""A plan must take this much more of the present load, as a share, to be worth a switch."""


class Planner:
    """Holds the present proposal, and decides when to make another.

    Attributes:
        provenance: How the proposal was made; None before the first.
        problem: Why there is no proposal, or not the wanted one; empty if all is well.
        load: The load of the models that are asked for rows, and whether it asks for a plan.
        answers: Number of plans made: a larger one tells that a request was answered.
        planned_agents: The agents that the proposal was made for, used or idle in it.
    """

    observes = (SessionRequested,)
    table = RedisTable.PLAN

    def __init__(
        self,
        maker: PlanBuilder,
        stability: AgentStability,
        replanning: LoadReplanning,
        started_s: float,
        demand: SessionDemand | None = None,
        availability: Availability | None = None,
    ) -> None:
        self._availability = availability or Availability()
        self._choice = AgentChoice(self._availability)
        self._maker = maker
        self._demand = demand or SessionDemand()
        self._stability = stability
        self.load = replanning
        self._started_s = started_s
        self._placement: Placement | None = None
        self._agents: frozenset[AgentId] = frozenset()
        self._models: tuple[DeployedModel, ...] = ()
        self._task: asyncio.Future[BuiltPlan] | None = None
        self._asked = ""
        self._closed = False
        self._retry_at_s: float | None = None
        self._retry_s = _FIRST_RETRY_S
        self._before: PlanProvenance | None = None
        self._times = ChangedTimes(replanning.policy)
        self._links = ChangedTimes(replanning.policy)
        self._idle: Mapping[AgentId, str] = {}
        """Reasons why agents are used by no pool of the proposal."""
        self._guessed: frozenset[ModelKey] = frozenset()
        """The models whose chains in the proposal go by guesses, since nobody measured them."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a plan was made beside the event loop."""
        self.provenance: PlanProvenance | None = None
        self.problem = ""
        self.answers = 0
        self.planned_agents: frozenset[AgentId] = frozenset()

    @property
    def cause(self) -> str:
        """The reason for which the proposal was made."""
        return self.provenance.cause if self.provenance is not None else ""

    @property
    def is_thinking(self) -> bool:
        """True while a plan is being made."""
        return self._task is not None

    # ---- what happened ----

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Follows the sessions asked for; what a predecessor was asked for is nothing new."""
        if isinstance(event, SessionRequested) and event.in_flight is None:
            self.session_arrived(event.model, event.prompt_tokens, now)

    def session_arrived(self, model: ModelKey, prompt_tokens: int, now: Nanoseconds) -> None:
        """Counts a request for text."""
        self._demand.arrived(model, prompt_tokens, now)

    def generated(self, model: ModelKey, tokens: int, now: Nanoseconds) -> None:
        """Counts tokens that were generated since the last call."""
        self._demand.generated(model, tokens, now)

    def answered(
        self, model: ModelKey, arrived_ns: Nanoseconds, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Keeps a session that was answered, by which chains are tuned."""
        self._demand.finished(model, arrived_ns, prompt_tokens, output_tokens)

    def session_shape(self, model: ModelKey) -> SessionShape:
        """Returns the mean lengths of a model's prompts and answers."""
        load = self.session_load(model)
        return SessionShape(load.prompt_tokens, load.output_tokens)

    def session_load(self, model: ModelKey) -> SessionLoad:
        """Returns the load of a model for which its chains would be composed now."""
        return self._demand.load(model, now_ns())

    def planned_rate(self, model: ModelKey) -> float:
        """Returns the sessions per second that chains of a model were composed for, or will be."""
        return self._demand.planned_rate(model)

    def ask(self, cause: str) -> None:
        """Has a plan made at the next `follow`, however good the present one is."""
        self._asked = cause

    def accepted(self) -> None:
        """Notes that the proposal came into force."""
        self._retry_at_s, self._retry_s = None, _FIRST_RETRY_S

    def rejected(self, present: Placement, problem: str, now_s: float) -> None:
        """Notes that the proposal failed: `present` stays in force; another plan is made later."""
        self._placement = present
        self.provenance = self._before or self.provenance
        self.problem = f"the last plan was given up: {problem}"
        self._try_again(now_s)

    def restore(
        self,
        placement: Placement,
        models: Sequence[DeployedModel],
        provenance: PlanProvenance | None,
        now: Nanoseconds,
    ) -> None:
        """Continues from the placement of an earlier scheduler."""
        self._placement = placement
        self._agents = self.planned_agents = frozenset(agents_of(placement))
        self._models = tuple(models)
        self.provenance = provenance
        if provenance is not None:
            self.load.planned(provenance.shares, now)

    def records(self) -> Fields:
        """Returns what Redis keeps of it: how the proposal was made."""
        return (
            {"notes": encode_document(self.provenance.stored())}
            if self.provenance is not None
            else {}
        )

    async def close(self) -> None:
        """Cancels a plan that is being made, and makes no other. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # ---- what should be ----

    def follow(
        self, models: Sequence[DeployedModel], registry: AgentRegistry, now_s: float
    ) -> Placement | None:
        """Returns the placement that should be served; None if there cannot be one yet."""
        if self._closed:
            return self._kept(registry)
        stability = self._stability
        there = eligible(
            registry,
            self._availability,
            self._agents | self._choice.left_out,
            stability,
            started_s=self._started_s,
            now_s=now_s,
        )
        agents = self._choice.fit(there)
        if agents != self._agents or tuple(models) != self._models:
            if not is_settled(registry, self._agents, agents, stability, now_s):
                return self._kept(registry)
            if self._placement is None and len(agents) < stability.expected_agents:
                self.problem = (
                    f"{len(agents)} of {stability.expected_agents} expected agents are there"
                )
                return None
            cause = self._difference(agents, tuple(models))
            self._agents, self._models = agents, tuple(models)
            self._plan(cause, registry, now_s)
        elif cause := self._choice.changed(self._placement, self._agents):
            self._plan(cause, registry, now_s)
        elif self._asked:
            self._plan(self._asked, registry, now_s)
        elif self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._plan(f"another try is due: {self.problem}", registry, now_s)
        elif not self.is_thinking and (
            cause := self.load.decide(_ns(now_s)) or self._changed_times(registry, _ns(now_s))
        ):
            self._plan(cause, registry, now_s, if_better=True)
        elif not self.is_thinking and (
            cause := self._first_measured()
            or self._demand.decide(_ns(now_s))
            or self._changed_links(registry, _ns(now_s))
        ):
            self._plan(cause, registry, now_s, chains_only=True)
        return self._kept(registry)

    def _changed_times(self, registry: AgentRegistry, now: Nanoseconds) -> str:
        """Returns in words whose measured times ask for a plan; empty if nobody's do."""
        if self._placement is None or not self._times.is_time(now):
            return ""
        factors = self._maker.corrections(self._models, self._present(registry))
        return self._times.decide(factors, now)

    def _changed_links(self, registry: AgentRegistry, now: Nanoseconds) -> str:
        """Returns in words which link asks for other chains; empty if none does."""
        placed = self._placement.models if self._placement is not None else ()
        if not any(model.chains for model in placed) or not self._links.is_time(now):
            return ""
        return self._links.decide(self._maker.link_factors(self._present(registry)), now)

    def _present(self, registry: AgentRegistry) -> tuple[Agent, ...]:
        """Returns the agents that plans are made for."""
        return tuple(registry[a].agent for a in sorted(self._agents) if a in registry)

    def _first_measured(self) -> str:
        """Returns in words which chains were measured for the first time; empty if none were."""
        if self._placement is None or not self._guessed:
            return ""
        known = [
            str(model.model)
            for model in self._placement.models
            if model.model in self._guessed and self._maker.is_measured(model)
        ]
        if not known:
            return ""
        self._guessed = frozenset()  # asked for once, whatever comes of it
        return f"agents have measured {', '.join(known)} for the first time"

    def _plan(
        self,
        cause: str,
        registry: AgentRegistry,
        now_s: float,
        *,
        if_better: bool = False,
        chains_only: bool = False,
    ) -> None:
        self._asked, self._retry_at_s = "", None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        wanted = PlanRequest(
            cause=cause,
            models=self._models,
            agents=self._present(registry),
            shares=self.load.shares(
                [model.key for model in self._models if model.decoder is None], _ns(now_s)
            ),
            hosted={agent: tuple(record.loaded) for agent, record in registry.items()},
            session_loads={
                model.key: replace(
                    self._demand.load(model.key, _ns(now_s)),
                    log=self._demand.logged(model.key, _ns(now_s)),
                )
                for model in self._models
                if model.decoder is not None
            },
            present=self._placement or Placement(()),
            provenance=self.provenance,
            chains_only=chains_only,
            unable=self._choice.unable(self._agents),
            idle=self._idle,
        )
        self._choice.planned(wanted.unable)
        # Whatever becomes of this plan, another for the same links would be the same.
        self._links.planned(self._maker.link_factors(wanted.agents), _ns(now_s))
        if not wanted.agents or not wanted.models:
            self.problem = "no agent is there" if self._models else ""
            self._placement = None
            self.answers += 1
        elif self._maker.is_immediate(wanted):
            self._take(lambda: self._maker.make_now(wanted), _ns(now_s), if_better)
        else:
            making = asyncio.ensure_future(self._maker.make(wanted))
            self._task = making
            making.add_done_callback(lambda done: self._built(done, if_better))
            if self._placement is None:
                self.problem = "a plan is being made"

    def _built(self, task: asyncio.Future[BuiltPlan], if_better: bool) -> None:
        if task is not self._task:
            return  # another request was made meanwhile
        self._task = None
        if task.cancelled():
            return
        self._take(task.result, now_ns(), if_better)
        self.changed()

    def _take(self, result: Callable[[], BuiltPlan], now: Nanoseconds, if_better: bool) -> None:
        self.answers += 1
        try:
            built = result()
        except CatenaryError as error:
            self.problem = error.message
            self._ask_the_unfit()
            return
        if built.problem:
            self._ask_the_unfit()
        if built.has_failed and self._still_serves():
            # A plan that works is worth more than an even split made because planning failed.
            self.problem = f"no new plan was made: {built.provenance.fallback}"
            self._try_again(now / NANOSECONDS_PER_SECOND)
            return
        self.problem = built.problem
        self.load.planned(built.provenance.shares, now)
        if built.provenance.planner == POOLED:
            self._times.planned(built.corrections, now)
        if if_better and self.provenance is not None and not _is_worth_it(self.provenance, built):
            _log.info("plan_kept", cause=built.provenance.cause)
            if built.placement == self._placement:  # what is told of it may be better known now
                self.provenance = replace(built.provenance, cause=self.provenance.cause)
            return
        _log.info(
            "plan_made",
            planner=built.provenance.planner,
            cause=built.provenance.cause,
            fallback=built.provenance.fallback,
        )
        if built.placement != self._placement:
            self._before = self.provenance
        self._demand.planned(built.session_loads, now)
        self._guessed, self._idle = frozenset(built.guessed), built.idle
        self._placement, self.provenance = built.placement, built.provenance
        self.planned_agents = self._agents

    def _ask_the_unfit(self) -> None:
        if self._choice.take_the_unfit():
            self.ask("the other agents do not suffice")

    def _try_again(self, now_s: float) -> None:
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)

    def _still_serves(self) -> bool:
        """True if the proposal serves every model with the agents there are."""
        if self._placement is None:
            return False
        left = without(self._placement, agents_of(self._placement) - self._agents)
        return {model.key for model in self._models} <= {model.model for model in left.models}

    def _difference(self, agents: frozenset[AgentId], models: tuple[DeployedModel, ...]) -> str:
        """Returns in words how models and agents differ from those of the proposal."""
        before = {model.key: model for model in self._models}
        said = []
        if came := sorted(agents - self._agents):
            said.append(f"{', '.join(came)} came")
        if left := sorted(self._agents - agents):
            said.append(f"{', '.join(left)} left")
        if other := [str(m.key) for m in models if before.get(m.key) != m]:
            said.append(f"{', '.join(other)} was deployed")
        return " and ".join(said) or "models changed"

    def _kept(self, registry: AgentRegistry) -> Placement | None:
        if self._placement is None:
            return None
        if self.is_thinking:
            # Agents that are draining serve until their successors are known. Otherwise all that
            # only they completed would be unloaded everywhere, and perhaps loaded again.
            return self._placement
        return without(self._placement, set(self._availability.impaired_by(Impairment.DRAINING)))


def _is_worth_it(present: PlanProvenance, built: BuiltPlan) -> bool:
    """True if a new plan takes notably more of the present load than the one in force."""
    new = built.provenance
    if built.present_rps > 0:  # both by the times that are known now
        return built.objective_rps >= built.present_rps * (1 + _LEAST_GAIN)
    if present.planner != POOLED or new.planner != POOLED:
        return present.planner != new.planner
    now = objective_at(present.throughput_rps, new.shares)
    return objective_at(new.throughput_rps, new.shares) >= now * (1 + _LEAST_GAIN)


def _ns(seconds: float) -> Nanoseconds:
    return int(seconds * NANOSECONDS_PER_SECOND)
