"""The agents of a cluster: who is there, what they host, and what they are told to host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler import targets
from scheduler.deployments import Deployments
from scheduler.hosting import Hosting
from scheduler.load_orders import LoadOrders
from scheduler.measured import Measured
from scheduler.planning import Placement
from scheduler.roster import AgentRecord, Loaded, Roster, hosts_in
from scheduler.switch import Facts, Phase, Switch
from scheduler.targets import Wanted
from services.domain.ids import AgentId, Epoch, ModelKey, Nanoseconds, PartitionKey
from services.domain.plan import Agent
from services.log import get_logger

_log = get_logger(__name__)
_NOTHING: Wanted = {}


class Yard(Protocol):
    """What the fleet tells the rest of the term, and asks of it."""

    @property
    def epoch(self) -> Epoch:
        """Stamped on every order."""
        ...

    def agent_joined(self, agent: Agent) -> None:
        """The dispatcher may use an agent."""
        ...

    def agent_lost(self, agent: AgentId) -> None:
        """The dispatcher must not use it any more."""
        ...

    def is_in_use(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True while a batch in flight, or a session, needs a partition."""
        ...


@dataclass(frozen=True, slots=True)
class Goal:
    """What the agents should host: the plan in force, the one to come, and the way between."""

    active: Placement
    target: Placement
    switch: Switch | None

    def wanted(self) -> Callable[[AgentId], Wanted]:
        """Returns a function: what must an agent host now. Everything else may go."""
        active = targets.wanted_by_agent(self.active)
        target = targets.wanted_by_agent(self.target)
        switch = self.switch

        def wanted(agent: AgentId) -> Wanted:
            new = target.get(agent, _NOTHING)
            old = active.get(agent, _NOTHING)
            if switch is not None and agent in switch.crowded:
                if switch.phase is Phase.MOVING:
                    return new
                if switch.phase is Phase.RETURNING:
                    return old
            return targets.joined(old, new)

        return wanted


class Fleet:
    """Agents and orders of one term."""

    def __init__(
        self, yard: Yard, deployments: Deployments, orders: LoadOrders, measured: Measured
    ) -> None:
        self._yard = yard
        self._orders = orders
        self._hosting = Hosting(deployments, orders)
        self._measured = measured
        self._inherited: set[AgentId] = set()
        self._recovery_until_s = 0.0
        self.roster: Roster = {}

    def expect_content(self, content_of: Callable[[ModelKey], str]) -> None:
        """Has agents told by `content_of` which digest what they load must have."""
        self._hosting.content_of = content_of

    # ---- what happened ----

    def inherit(self, placement: Placement, until_s: float) -> None:
        """The agents of a predecessor's plan are about to report; after `until_s` they are late."""
        self._inherited = targets.agents_of(placement)
        self._recovery_until_s = until_s

    def connected(self, record: AgentRecord) -> None:
        """An agent said hello, with what it hosts already."""
        agent_id = record.agent.agent_id
        for key, loaded in record.loaded.items():
            self._learn(agent_id, key, loaded)
        self.roster[agent_id] = record

    def disconnected(self, agent_id: AgentId, now_s: float) -> None:
        """An agent is gone, and what it held is gone with it."""
        record = self.roster[agent_id]
        record.session = None
        record.since_s = now_s
        record.loaded.clear()
        record.layouts.clear()
        self._orders.forget(agent_id)
        if record.joined:
            record.joined = False
            self._yard.agent_lost(agent_id)

    def loaded(self, agent_id: AgentId, key: PartitionKey, loaded: Loaded, now_s: float) -> None:
        """An order was carried out."""
        record = self.roster[agent_id]
        record.loaded[key] = loaded
        self._learn(agent_id, key, loaded)
        ordered, has = record.layouts.get(key), loaded.cache
        if ordered is not None and (has is None or not has.includes(ordered)):
            said = f"it has {has.block_slots if has else 0} of {ordered.block_slots} block slots"
            self._orders.failed(agent_id, key, said, now_s)
        else:
            self._orders.loaded(agent_id, key)

    def lost(self, agent_id: AgentId, key: PartitionKey) -> None:
        """An agent does not host a partition any more; it is not used until it does again."""
        record = self.roster[agent_id]
        record.loaded.pop(key, None)
        record.layouts.pop(key, None)
        self._orders.forget(agent_id)
        if record.joined:
            record.joined = False
            self._yard.agent_lost(agent_id)

    def give_up(self, agent_id: AgentId, key: PartitionKey, problem: str, now_s: float) -> None:
        """An agent has loaded what it must not serve: it gives that up, and is asked anew."""
        self.lost(agent_id, key)
        record = self.roster[agent_id]
        if record.session is not None:
            self._hosting.give_up(record, key, self._yard.epoch)
        self._orders.failed(agent_id, key, problem, now_s)

    # ---- what is known ----

    def draining(self) -> set[AgentId]:
        """Returns the agents that are to go."""
        return {agent for agent, record in self.roster.items() if record.draining}

    def is_present(self, agent: AgentId) -> bool:
        """True for an agent that is connected."""
        record = self.roster.get(agent)
        return record is not None and record.session is not None

    def missing(
        self, placement: Placement, now_s: float, unable: Collection[AgentId] = ()
    ) -> list[tuple[AgentId, PartitionKey]]:
        """Returns what a placement lacks, without what need not be waited for.

        Args:
            placement: What is asked about.
            now_s: On `time.monotonic`.
            unable: Agents that are not waited for either.
        """

        def is_excused(agent: AgentId) -> bool:
            return agent in unable or self._is_excused(agent, now_s)

        return targets.missing(placement, hosts_in(self.roster), is_excused)

    def loaded_models(
        self, placement: Placement, now_s: float, *, resuming: bool = False
    ) -> set[ModelKey]:
        """Returns the models of a placement of which nothing is missing.

        An agent that failed too often to load its part is not waited for either, as long as every
        pool, or a chain, has all it needs; it joins if it succeeds after all.

        Args:
            placement: What is asked about.
            now_s: On `time.monotonic`.
            resuming: One whole chain is enough for a model that has chains.
        """
        found = set()
        for model in placement.models:
            part = Placement((model,))
            lacking = self.missing(part, now_s)
            if unable := {agent for agent, key in lacking if self._orders.gave_up(agent, key)}:
                lacking = self.missing(part, now_s, unable)
            if lacking and resuming and model.chains:
                lacking = targets.missing(part, hosts_in(self.roster), lambda agent: True)
            if not lacking:
                found.add(model.model)
        return found

    def facts(
        self,
        goal: Goal,
        objection: Callable[[Placement], str],
        now_ns: Nanoseconds,
        now_s: float,
    ) -> Facts:
        """Returns the cluster as a switch sees it."""
        by_agent = _remembered(targets.wanted_by_agent)

        def surplus(agent: AgentId, placement: Placement) -> list[PartitionKey]:
            mine = by_agent(placement).get(agent, _NOTHING)
            return [key for key in self.roster[agent].loaded if key not in mine]

        def is_crowded(agent: AgentId) -> bool:
            mine = by_agent(goal.target).get(agent, _NOTHING)
            return self.is_present(agent) and self._hosting.is_crowded(self.roster[agent], mine)

        return Facts(
            now_ns=now_ns,
            active=goal.active,
            missing=lambda placement: self.missing(placement, now_s),
            is_present=self.is_present,
            gave_up=self._orders.gave_up,
            is_crowded=is_crowded,
            is_ordered=self._orders.is_open,
            in_use=self._yard.is_in_use,
            surplus=surplus,
            objection=objection,
        )

    # ---- what is done ----

    def forget_orders(self, agent: AgentId) -> None:
        """What an agent was asked and refused says nothing any more."""
        self._orders.forget(agent)

    def join_loaded(self, placement: Placement) -> None:
        """Gives the dispatcher the agents that host all the plan in force wants of them."""
        wanted = targets.wanted_by_agent(placement)
        for agent_id, record in self.roster.items():
            if record.joined or record.session is None or record.draining:
                continue
            mine = wanted.get(agent_id)
            if mine and all(record.hosts(key, need) for key, need in mine.items()):
                record.joined = True
                self._yard.agent_joined(record.agent)

    def part_from_unloaded(self, placement: Placement) -> None:
        """Takes from the dispatcher the agents that lack something of the plan in force.

        They join again when they have loaded it.
        """
        wanted = targets.wanted_by_agent(placement)
        for agent_id, record in self.roster.items():
            mine = wanted.get(agent_id, _NOTHING)
            if record.joined and not all(record.hosts(key, n) for key, n in mine.items()):
                record.joined = False
                self._yard.agent_lost(agent_id)

    def host(self, goal: Goal, now_s: float, *, may_unload: bool) -> None:
        """Has agents load and unload."""
        wanted = goal.wanted()
        target = targets.wanted_by_agent(goal.target)

        def has_surplus(record: AgentRecord) -> bool:
            new = target.get(record.agent.agent_id, _NOTHING)
            return any(key not in new for key in record.loaded)

        epoch = self._yard.epoch
        if may_unload:
            self._hosting.unload(self.roster, wanted, self._yard.is_in_use, epoch)
        self._hosting.load(self.roster, wanted, has_surplus, now_s, epoch)

    def _is_excused(self, agent: AgentId, now_s: float) -> bool:
        """A lost agent comes back by itself; one never seen is part of what is waited for."""
        record = self.roster.get(agent)
        if record is not None:
            return record.session is None
        return agent in self._inherited and now_s >= self._recovery_until_s

    def _learn(self, agent: AgentId, key: PartitionKey, loaded: Loaded) -> None:
        self._measured.put(agent, key, loaded.compute_ns)
        if loaded.generation is not None:
            self._measured.put_generation(agent, key, loaded.generation)
        self._hosting.learn(key, loaded.memory_bytes)


def _remembered(
    work: Callable[[Placement], dict[AgentId, Wanted]],
) -> Callable[[Placement], dict[AgentId, Wanted]]:
    """Returns `work` that does each placement once: they are large, and the same few objects."""
    done: dict[int, tuple[Placement, dict[AgentId, Wanted]]] = {}

    def remembered(placement: Placement) -> dict[AgentId, Wanted]:
        if id(placement) not in done:
            done[id(placement)] = placement, work(placement)  # kept, so that the id stays its own
        return done[id(placement)][1]

    return remembered


def agents_by_state(roster: Mapping[AgentId, AgentRecord]) -> dict[str, int]:
    """Returns how many agents are in each state."""
    counts = dict.fromkeys(("joining", "ready", "draining", "lost"), 0)
    for record in roster.values():
        counts[record.state] += 1
    return counts
