"""The partitions that connected agents host, and the orders that bring them to what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.load_commands import LoadCommands
from catenary_scheduler.agents.load_orders import LoadOrders
from catenary_scheduler.agents.registry import AgentRegistry, AgentState, LoadedPartition, hosts_in
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import Placement, requirements
from catenary_scheduler.planning.requirements import Requirements
from catenary_scheduler.rollout.rollout import ClusterSnapshot, PlanRollout, RolloutPhase
from catenary_services.domain.ids import AgentId, Epoch, ModelKey, Nanoseconds, PartitionKey
from catenary_services.domain.plan import Agent
from catenary_services.log import get_logger

_log = get_logger(__name__)
_NOTHING: Requirements = {}
_WAIT_FOR_MATES_S = 1.0
"""A model that can be served waits this long for those of its agents that still load."""


class AgentCallbacks(Protocol):
    """Callbacks to the rest of the term."""

    @property
    def epoch(self) -> Epoch:
        """The epoch stamped on every order."""
        ...

    @property
    def availability(self) -> Availability:
        """The view of which agents can be given work."""
        ...

    def agent_joined(self, agent: Agent) -> None:
        """Tells the dispatcher that an agent is there; it may use what the agent has loaded."""
        ...

    def agent_lost(self, agent: AgentId) -> None:
        """Tells the dispatcher that an agent, and all it held and was to do, is lost."""
        ...

    def is_in_use(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while a batch in flight, or a session, needs a partition."""
        ...


@dataclass(frozen=True, slots=True)
class HostingGoal:
    """Placements that agents host for: the one in force, the next one, and the way between."""

    active: Placement
    target: Placement
    rollout: PlanRollout | None

    def required(self) -> Callable[[AgentId], Requirements]:
        """Returns what an agent must host now, as a function; the rest may be unloaded."""
        active = requirements.required_by_agent(self.active)
        target = requirements.required_by_agent(self.target)
        rollout = self.rollout

        def required(agent: AgentId) -> Requirements:
            new = target.get(agent, _NOTHING)
            old = active.get(agent, _NOTHING)
            if rollout is not None and agent in rollout.crowded:
                if rollout.phase is RolloutPhase.MOVING:
                    return new
                if rollout.phase is RolloutPhase.RETURNING:
                    return old
            return requirements.joined(old, new)

        return required


class PartitionHosting:
    """The agents of one term, and their orders to load and unload."""

    def __init__(
        self,
        callbacks: AgentCallbacks,
        deployments: Deployments,
        orders: LoadOrders,
        measured: MeasuredProfiles,
    ) -> None:
        self._callbacks = callbacks
        self._orders = orders
        self._availability = callbacks.availability
        self._load_commands = LoadCommands(deployments, orders, callbacks.availability)
        self._measured = measured
        self._inherited: set[AgentId] = set()
        self._recovery_until_s = 0.0
        self._whole_since_s: dict[ModelKey, float] = {}
        self.registry: AgentRegistry = {}

    def expect_content(
        self,
        content_of: Callable[[ModelKey], str],
        sources_of: Callable[[ModelKey, AgentId], list[str]],
    ) -> None:
        """Makes agents verify the digest that `content_of` gives for a model when they load it.

        An agent that lacks files fetches them from the peers that `sources_of` names.
        """
        self._load_commands.content_of = content_of
        self._load_commands.sources_of = sources_of

    # ---- what happened ----

    def inherit(self, placement: Placement, until_s: float) -> None:
        """Expects the agents of an earlier scheduler's plan; after `until_s` they count as late."""
        self._inherited = requirements.agents_of(placement)
        self._recovery_until_s = until_s

    def connected(self, record: AgentState) -> None:
        """Handles the hello of an agent, which names what it hosts already."""
        agent_id = record.agent.agent_id
        for key, loaded in record.loaded.items():
            self._learn(agent_id, key, loaded)
        self.registry[agent_id] = record

    def disconnected(self, agent_id: AgentId, now_s: float) -> None:
        """Handles the loss of an agent, and of all it held."""
        record = self.registry[agent_id]
        record.session = None
        record.since_s = now_s
        record.loaded.clear()
        record.layouts.clear()
        self._orders.forget(agent_id)
        record.complete = False
        self._callbacks.agent_lost(agent_id)

    def loaded(
        self, agent_id: AgentId, key: PartitionKey, loaded: LoadedPartition, now_s: float
    ) -> None:
        """Handles the answer of an agent that has loaded a partition."""
        record = self.registry[agent_id]
        record.loaded[key] = loaded
        self._learn(agent_id, key, loaded)
        ordered, has = record.layouts.get(key), loaded.cache
        if ordered is not None and (has is None or not has.includes(ordered)):
            said = f"it has {has.block_slots if has else 0} of {ordered.block_slots} block slots"
            self._orders.failed(agent_id, key, said, now_s)
        else:
            self._orders.loaded(agent_id, key)

    def lost(self, agent_id: AgentId, key: PartitionKey) -> None:
        """Handles the loss of a partition on an agent, whose orders and work begin anew."""
        record = self.registry[agent_id]
        record.loaded.pop(key, None)
        record.layouts.pop(key, None)
        self._orders.forget(agent_id)
        if record.session is not None:
            record.complete = False
            self._callbacks.agent_lost(agent_id)
            self._callbacks.agent_joined(record.agent)

    def give_up(self, agent_id: AgentId, key: PartitionKey, problem: str, now_s: float) -> None:
        """Unloads a partition that an agent must not serve; it is ordered again later."""
        self.lost(agent_id, key)
        record = self.registry[agent_id]
        if record.session is not None:
            self._load_commands.give_up(record, key, self._callbacks.epoch)
        self._orders.failed(agent_id, key, problem, now_s)

    # ---- what is known ----

    def draining(self) -> frozenset[AgentId]:
        return self._availability.impaired_by(Impairment.DRAINING)

    def is_present(self, agent: AgentId) -> bool:
        record = self.registry.get(agent)
        return record is not None and record.session is not None

    def missing(self, placement: Placement, now_s: float) -> list[tuple[AgentId, PartitionKey]]:
        """Returns the partitions that a placement lacks and that are worth waiting for.

        Agents that are away are not waited for, nor those that could not load their part, as long
        as every pool, or a chain, has all it needs; they serve if they come or succeed after all.

        Args:
            placement: The placement in question.
            now_s: The moment, on `time.monotonic`.
        """
        unable: set[AgentId] = set()

        def is_excused(agent: AgentId) -> bool:
            return agent in unable or self._is_excused(agent, now_s)

        lacking = requirements.missing(placement, hosts_in(self.registry), is_excused)
        unable |= {agent for agent, key in lacking if self._availability.failure(agent, key)}
        if unable:
            lacking = requirements.missing(placement, hosts_in(self.registry), is_excused)
        return lacking

    def loaded_models(
        self, placement: Placement, now_s: float, *, resuming: bool = False
    ) -> set[ModelKey]:
        """Returns the models of a placement that can be served.

        Nothing is missing of such a model, or only partitions that it can be served without and has
        waited for: a model does not wait long for the slowest of its agents.

        Args:
            placement: The placement in question.
            now_s: The moment, on `time.monotonic`.
            resuming: One whole chain is enough for a model that has chains.
        """
        found = set()
        for model in placement.models:
            part, key = Placement((model,)), model.model
            lacking = self.missing(part, now_s)
            if lacking and requirements.missing(part, hosts_in(self.registry), lambda agent: True):
                self._whole_since_s.pop(key, None)
                continue
            since_s = self._whole_since_s.setdefault(key, now_s)
            is_impatient = (resuming and model.chains) or now_s - since_s >= _WAIT_FOR_MATES_S
            if not lacking or is_impatient:
                found.add(key)
        return found

    def snapshot(
        self,
        goal: HostingGoal,
        objection: Callable[[Placement], str],
        now_ns: Nanoseconds,
        now_s: float,
    ) -> ClusterSnapshot:
        by_agent = _remembered(requirements.required_by_agent)

        def surplus(agent: AgentId, placement: Placement) -> list[PartitionKey]:
            mine = by_agent(placement).get(agent, _NOTHING)
            return [key for key in self.registry[agent].loaded if key not in mine]

        def is_crowded(agent: AgentId) -> bool:
            mine = by_agent(goal.target).get(agent, _NOTHING)
            return self.is_present(agent) and self._load_commands.is_crowded(
                self.registry[agent], mine
            )

        return ClusterSnapshot(
            now_ns=now_ns,
            active=goal.active,
            missing=lambda placement: self.missing(placement, now_s),
            is_present=self.is_present,
            gave_up=self._availability.failure,
            is_crowded=is_crowded,
            is_ordered=self._orders.is_open,
            in_use=self._callbacks.is_in_use,
            surplus=surplus,
            objection=objection,
        )

    # ---- what is done ----

    def forget_orders(self, agent: AgentId) -> None:
        """Forgets what an agent was ordered and refused."""
        self._orders.forget(agent)

    def tell_loaded(self, placement: Placement) -> None:
        """Tells the availability which agents can serve which partitions of the plan in force."""
        required = requirements.required_by_agent(placement)
        for agent_id, record in self.registry.items():
            if not self._availability.is_connected(agent_id):
                continue
            mine = required.get(agent_id, _NOTHING)
            able = [k for k in record.loaded if k not in mine or record.hosts(k, mine[k])]
            self._availability.hosts(agent_id, able)
            record.complete = bool(mine) and all(record.hosts(k, n) for k, n in mine.items())

    def host(self, goal: HostingGoal, now_s: float, *, may_unload: bool) -> None:
        """Orders agents to load what is missing and, if `may_unload`, to unload the rest."""
        required = goal.required()
        target = requirements.required_by_agent(goal.target)

        def has_surplus(record: AgentState) -> bool:
            new = target.get(record.agent.agent_id, _NOTHING)
            return any(key not in new for key in record.loaded)

        epoch = self._callbacks.epoch
        if may_unload:
            self._load_commands.unload(self.registry, required, self._callbacks.is_in_use, epoch)
        self._load_commands.load(self.registry, required, has_surplus, now_s, epoch)

    def _is_excused(self, agent: AgentId, now_s: float) -> bool:
        """True for an agent that is not waited for: a lost one, which comes back by itself.

        An agent never seen is waited for; one of an earlier scheduler's plan only until it is late.
        """
        record = self.registry.get(agent)
        if record is not None:
            return record.session is None
        return agent in self._inherited and now_s >= self._recovery_until_s

    def _learn(self, agent: AgentId, key: PartitionKey, loaded: LoadedPartition) -> None:
        self._measured.put(agent, key, loaded.compute_ns)
        if loaded.generation is not None:
            self._measured.put_generation(agent, key, loaded.generation)
        self._load_commands.learn(key, loaded.memory_bytes)


def _remembered(
    work: Callable[[Placement], dict[AgentId, Requirements]],
) -> Callable[[Placement], dict[AgentId, Requirements]]:
    """Returns `work` with its results cached: the same few large placements are asked about."""
    done: dict[int, tuple[Placement, dict[AgentId, Requirements]]] = {}

    def remembered(placement: Placement) -> dict[AgentId, Requirements]:
        if id(placement) not in done:
            done[id(placement)] = placement, work(placement)  # kept, so that the id is not reused
        return done[id(placement)][1]

    return remembered
