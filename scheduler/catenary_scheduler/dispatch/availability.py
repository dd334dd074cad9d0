"""The one view of which agents can be given what: read by planner, dispatcher and status alike.

An agent can serve a partition while it is connected and has the partition loaded. Beyond that,
something may speak against giving it work: an *impairment*, of the whole agent or of one partition
on it, from slow to untrustworthy. Whoever chooses among the members of a stage gets those with
the least serious impairment, so that an impairment steers work to others where there are others,
and never takes the last member a stage has. The same holds one level up: of the pipelines or
chains of a model, those are used whose worst stage is the least impaired.

Nothing here is asked for each request. `version` tells those who made routes from an earlier
answer that they have to ask again. Pure; moments are given.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey


class Impairment(enum.IntEnum):
    """What speaks against giving work to an agent, from the least to the most serious."""

    STRAGGLING = 1
    """It computes much more slowly than is booked for it."""
    SILENT = 2
    """It has not been heard of for a while, though its stream is open."""
    SUSPECTED = 3
    """Work was just lost there, perhaps because it is about to be found gone."""
    DRAINING = 4
    """It is to go."""
    BROKEN = 5
    """Its executor fails again and again, or is stuck."""
    QUARANTINED = 6
    """It said what cannot be true."""


UNFIT = Impairment.BROKEN
"""Who is impaired like this, or worse, is not planned on while the others suffice."""


@dataclass(frozen=True, slots=True)
class ImpairmentMark:
    """One impairment: until when it holds, and why, in words for people."""

    until: Nanoseconds | None
    """None: until it is cleared."""
    why: str


@dataclass(frozen=True, slots=True)
class ImpairmentReport:
    """One thing that speaks against an agent, for people."""

    kind: str
    """Name of the impairment in lower case, "cannot_load", or "severed" (from another agent)."""
    partition: PartitionKey | None
    """None: all of the agent."""
    until: Nanoseconds | None
    """When it is over, or tried again; None: when it is cleared."""
    why: str


@dataclass(slots=True)
class _Known:
    """What is known of one agent; `None` as a partition stands for all it has."""

    loaded: set[PartitionKey] = field(default_factory=set)
    marks: dict[tuple[PartitionKey | None, Impairment], ImpairmentMark] = field(
        default_factory=dict
    )
    unable: dict[PartitionKey, ImpairmentMark] = field(default_factory=dict)
    """What it could not load; `until` is when it is asked again."""


class Availability:
    """Per agent and partition: connected, loaded, impaired by what.

    Impairments survive a disconnection: an agent that comes back is as impaired as it went. What
    it could not load does not: its disk, or its memory, may be another.

    Args:
        everything_loaded: Every agent that is connected can serve every partition, as where there
            are no agents but in a simulation.
    """

    def __init__(self, *, everything_loaded: bool = False) -> None:
        self._everything_loaded = everything_loaded
        self._agents: dict[AgentId, _Known] = {}
        self._connected: set[AgentId] = set()
        self._severed: dict[frozenset[AgentId], ImpairmentMark] = {}
        """Pairs between which frames get lost; each end may be well with everybody else."""
        self._next_expiry: Nanoseconds | None = None
        self.version = 0
        """Grows with every change; who has seen this version need not ask again."""

    # ---- what happened ----

    def connected(self, agent: AgentId) -> None:
        """An agent said hello; it has loaded nothing until that is said."""
        self._connected.add(agent)
        self._begins_anew(agent)

    def disconnected(self, agent: AgentId) -> None:
        """An agent is gone, and what it had loaded with it."""
        self._connected.discard(agent)
        self._begins_anew(agent)

    def loaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """An agent can serve a partition."""
        known = self._of(agent)
        if partition not in known.loaded:
            known.loaded.add(partition)
            self.version += 1

    def unloaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """An agent does not have a partition any more."""
        known = self._of(agent)
        if partition in known.loaded:
            known.loaded.discard(partition)
            self.version += 1

    def hosts(self, agent: AgentId, partitions: Collection[PartitionKey]) -> None:
        """An agent can serve these partitions, and no others."""
        known = self._of(agent)
        now = set(partitions)
        if now != known.loaded:
            known.loaded = now
            self.version += 1

    def impair(
        self,
        agent: AgentId,
        impairment: Impairment,
        *,
        until: Nanoseconds | None = None,
        partition: PartitionKey | None = None,
        why: str = "",
    ) -> None:
        """Something speaks against an agent, or against one partition on it."""
        self._of(agent).marks[partition, impairment] = ImpairmentMark(until, why)
        self._expires(until)
        self.version += 1

    def clear(
        self, agent: AgentId, impairment: Impairment, *, partition: PartitionKey | None = None
    ) -> None:
        """It does not any more."""
        known = self._agents.get(agent)
        if known is not None and known.marks.pop((partition, impairment), None) is not None:
            self._forget_if_nothing_is_known(agent, known)
            self.version += 1

    def cannot_load(
        self, agent: AgentId, partition: PartitionKey, why: str, until: Nanoseconds | None = None
    ) -> None:
        """An agent could not load a partition, and is asked again then."""
        unable = self._of(agent).unable
        if unable.get(partition) != ImpairmentMark(until, why):
            unable[partition] = ImpairmentMark(until, why)
            self.version += 1

    def may_load(self, agent: AgentId, partition: PartitionKey) -> None:
        """Nothing says any more that an agent cannot load a partition."""
        known = self._agents.get(agent)
        if known is not None and known.unable.pop(partition, None) is not None:
            self.version += 1

    def sever(self, one: AgentId, other: AgentId, until: Nanoseconds, why: str = "") -> None:
        """Frames between two agents were lost: a way over both is as if one were suspected."""
        self._severed[frozenset((one, other))] = ImpairmentMark(until, why)
        self._expires(until)
        self.version += 1

    def expire(self, now: Nanoseconds) -> None:
        """Clears the impairments whose time is over."""
        if self._next_expiry is None or self._next_expiry > now:
            return
        self._next_expiry = None
        for pair, severed in list(self._severed.items()):
            if severed.until is not None and severed.until <= now:
                del self._severed[pair]
                self.version += 1
            else:
                self._expires(severed.until)
        for agent, known in list(self._agents.items()):
            for key, mark in list(known.marks.items()):
                if mark.until is None:
                    continue
                if mark.until <= now:
                    del known.marks[key]
                    self.version += 1
                else:
                    self._expires(mark.until)
            self._forget_if_nothing_is_known(agent, known)

    # ---- what is asked ----

    def next_expiry(self) -> Nanoseconds | None:
        """When `expire` may have something to do."""
        return self._next_expiry

    @property
    def connected_agents(self) -> frozenset[AgentId]:
        """The agents that are there."""
        return frozenset(self._connected)

    def is_connected(self, agent: AgentId) -> bool:
        """True between hello and goodbye of an agent."""
        return agent in self._connected

    def impairment_of(
        self, agent: AgentId, partition: PartitionKey | None = None
    ) -> Impairment | None:
        """Returns the most serious impairment of an agent for a partition, if any."""
        worst: Impairment | None = None
        known = self._agents.get(agent)
        if known is not None:
            for part, each in known.marks:
                if (part is None or part == partition) and (worst is None or each > worst):
                    worst = each
        return worst

    def rank(self, agent: AgentId, partition: PartitionKey | None = None) -> int:
        """Returns how serious the worst impairment of an agent for a partition is; 0: none."""
        return int(self.impairment_of(agent, partition) or 0)

    def mark_of(
        self, agent: AgentId, impairment: Impairment, partition: PartitionKey | None = None
    ) -> ImpairmentMark | None:
        """Returns an impairment of an agent as a whole, or of one partition on it."""
        known = self._agents.get(agent)
        return known.marks.get((partition, impairment)) if known is not None else None

    def are_severed(self, one: AgentId, other: AgentId) -> bool:
        """True if frames between two agents were lost a while ago at most."""
        return bool(self._severed) and frozenset((one, other)) in self._severed

    def impaired_by(self, impairment: Impairment) -> frozenset[AgentId]:
        """Returns the agents that are, as a whole, impaired by this."""
        return frozenset(
            agent for agent, known in self._agents.items() if (None, impairment) in known.marks
        )

    def can_serve(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True if an agent is connected and has a partition loaded, however impaired."""
        if agent not in self._connected:
            return False
        if self._everything_loaded:
            return True
        known = self._agents.get(agent)
        return known is not None and partition in known.loaded

    def members(self, partition: PartitionKey, agents: Iterable[AgentId]) -> tuple[AgentId, ...]:
        """Returns those of `agents` that should be given a partition's work.

        They are those that can serve it and are the least impaired; empty only if nobody can.
        """
        able = [agent for agent in agents if self.can_serve(agent, partition)]
        return self.least_impaired(able, partition)

    def least_impaired(
        self, agents: Iterable[AgentId], partition: PartitionKey | None = None
    ) -> tuple[AgentId, ...]:
        """Returns the least impaired of `agents`, in their order; empty only if `agents` is."""
        ranks = {agent: self.rank(agent, partition) for agent in agents}
        best = min(ranks.values(), default=0)
        return tuple([agent for agent, each in ranks.items() if each == best])

    def plannable(self, agents: Iterable[AgentId]) -> frozenset[AgentId]:
        """Returns those of `agents` to plan on: nobody unfit, unless all are.

        Who is to go is left out in any case; it serves until there is a plan without it.
        """
        staying = [each for each in agents if self.mark_of(each, Impairment.DRAINING) is None]
        fit = frozenset(agent for agent in staying if self.rank(agent) < UNFIT)
        return fit or frozenset(staying)

    def failure(self, agent: AgentId, partition: PartitionKey) -> str:
        """Returns why an agent could not load a partition; empty if nothing says that."""
        known = self._agents.get(agent)
        mark = known.unable.get(partition) if known is not None else None
        return mark.why if mark is not None else ""

    def unable(self) -> dict[ModelKey, frozenset[AgentId]]:
        """Returns, by model, the agents that could not load a part of it."""
        found: dict[ModelKey, set[AgentId]] = {}
        for agent, known in self._agents.items():
            for partition in known.unable:
                found.setdefault(partition.model, set()).add(agent)
        return {model: frozenset(agents) for model, agents in found.items()}

    def troubles(self, agent: AgentId) -> list[ImpairmentReport]:
        """Returns everything that speaks against an agent, the most serious first."""
        known = self._agents.get(agent)
        if known is None:
            return []
        marks = sorted(known.marks.items(), key=_seriousness)
        found = [
            ImpairmentReport(impairment.name.lower(), partition, mark.until, mark.why)
            for (partition, impairment), mark in marks
        ]
        found += [
            ImpairmentReport("cannot_load", partition, mark.until, mark.why)
            for partition, mark in sorted(known.unable.items())
        ]
        found += [
            ImpairmentReport("severed", None, mark.until, mark.why)
            for pair, mark in self._severed.items()
            if agent in pair
        ]
        return found

    # ---- inside ----

    def _begins_anew(self, agent: AgentId) -> None:
        known = self._of(agent)
        known.loaded.clear()
        known.unable.clear()
        self._forget_if_nothing_is_known(agent, known)
        self.version += 1

    def _forget_if_nothing_is_known(self, agent: AgentId, known: _Known) -> None:
        """Keeps nothing of agents that are gone, however many names they come under."""
        if agent not in self._connected and not (known.marks or known.loaded or known.unable):
            self._agents.pop(agent, None)

    def _expires(self, until: Nanoseconds | None) -> None:
        if until is not None and (self._next_expiry is None or until < self._next_expiry):
            self._next_expiry = until

    def _of(self, agent: AgentId) -> _Known:
        return self._agents.setdefault(agent, _Known())


def _seriousness(
    entry: tuple[tuple[PartitionKey | None, Impairment], ImpairmentMark],
) -> tuple[int, str]:
    (partition, impairment), _ = entry
    return -int(impairment), str(partition or "")
