"""Tells which agents can be given which work: one view for planner, dispatcher and status.

An agent can serve a partition while it is connected and has the partition loaded. Beyond that,
something may speak against giving it work: an *impairment*, of the whole agent or of one partition
on it, from slow to untrustworthy. Among the members of a stage, those with the least serious
impairment are chosen, so that an impairment steers work to other members where there are any, and
never takes the last one. The same holds one level up: of the pipelines or chains of a model, those
are used whose worst stage is the least impaired.

Nothing here is asked for each request: routes are made from the answers, and are made anew when
`version` has grown. The module does no I/O and reads no clock: moments are passed in.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey


class Impairment(enum.IntEnum):
    """Reasons against giving work to an agent, from the least to the most serious."""

    STRAGGLING = 1
    """The agent computes much more slowly than is booked for it."""
    SILENT = 2
    """The agent has not been heard of for a while, though its stream is open."""
    SUSPECTED = 3
    """The agent just lost work, perhaps because it is gone and this is not yet known."""
    DRAINING = 4
    """The agent is to be removed from the cluster."""
    BROKEN = 5
    """The agent's executor fails again and again, or is stuck."""
    QUARANTINED = 6
    """The agent reported something that cannot be true."""


UNFIT = Impairment.BROKEN
"""An agent with this or a worse impairment is not planned on while the others suffice."""


@dataclass(frozen=True, slots=True)
class ImpairmentMark:
    """One impairment: how long it holds, and the reason in words for people."""

    until: Nanoseconds | None
    """The moment at which it ends; None: it lasts until it is cleared."""
    why: str


@dataclass(frozen=True, slots=True)
class ImpairmentReport:
    """One impairment of an agent, for people."""

    kind: str
    """Name of the impairment in lower case, "cannot_load", or "severed" (from another agent)."""
    partition: PartitionKey | None
    """The partition concerned; None: the whole agent."""
    until: Nanoseconds | None
    """The moment at which it ends or the agent is tried again; None: it lasts until it is
    cleared."""
    why: str


@dataclass(slots=True)
class _Known:
    """Everything known of one agent; `None` as a partition stands for all it has."""

    loaded: set[PartitionKey] = field(default_factory=set)
    marks: dict[tuple[PartitionKey | None, Impairment], ImpairmentMark] = field(
        default_factory=dict
    )
    unable: dict[PartitionKey, ImpairmentMark] = field(default_factory=dict)
    """Partitions it could not load; `until` is the moment at which it is asked again."""


class Availability:
    """Agents and partitions that are connected, loaded, and impaired.

    Impairments survive a disconnection: an agent that comes back is as impaired as it went. A
    failure to load does not survive it: the agent may have another disk, or other memory.

    Args:
        everything_loaded: Every connected agent can serve every partition. For simulations, which
            have no agents that load.
    """

    def __init__(self, *, everything_loaded: bool = False) -> None:
        self._everything_loaded = everything_loaded
        self._agents: dict[AgentId, _Known] = {}
        self._connected: set[AgentId] = set()
        self._severed: dict[frozenset[AgentId], ImpairmentMark] = {}
        """Pairs of agents between which frames get lost; each end may work well with all others."""
        self._next_expiry: Nanoseconds | None = None
        self.version = 0
        """Number of changes; a reader that has seen this version need not ask again."""

    # ---- what happened ----

    def connected(self, agent: AgentId) -> None:
        """Notes that an agent connected; it counts as having nothing loaded."""
        self._connected.add(agent)
        self._begins_anew(agent)

    def disconnected(self, agent: AgentId) -> None:
        """Notes that an agent is gone, and what it had loaded with it."""
        self._connected.discard(agent)
        self._begins_anew(agent)

    def loaded(self, agent: AgentId, partition: PartitionKey) -> None:
        known = self._of(agent)
        if partition not in known.loaded:
            known.loaded.add(partition)
            self.version += 1

    def hosts(self, agent: AgentId, partitions: Collection[PartitionKey]) -> None:
        """Notes that an agent has loaded these partitions, and no others."""
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
        """Adds an impairment to an agent, or to one partition on it."""
        self._of(agent).marks[partition, impairment] = ImpairmentMark(until, why)
        self._expires(until)
        self.version += 1

    def clear(
        self, agent: AgentId, impairment: Impairment, *, partition: PartitionKey | None = None
    ) -> None:
        """Removes an impairment of an agent, or of one partition on it."""
        known = self._agents.get(agent)
        if known is not None and known.marks.pop((partition, impairment), None) is not None:
            self._forget_if_nothing_is_known(agent, known)
            self.version += 1

    def cannot_load(
        self, agent: AgentId, partition: PartitionKey, why: str, until: Nanoseconds | None = None
    ) -> None:
        """Notes that an agent could not load a partition, and is asked again at `until`."""
        unable = self._of(agent).unable
        if unable.get(partition) != ImpairmentMark(until, why):
            unable[partition] = ImpairmentMark(until, why)
            self.version += 1

    def may_load(self, agent: AgentId, partition: PartitionKey) -> None:
        """Forgets that an agent could not load a partition."""
        known = self._agents.get(agent)
        if known is not None and known.unable.pop(partition, None) is not None:
            self.version += 1

    def sever(self, one: AgentId, other: AgentId, until: Nanoseconds, why: str = "") -> None:
        """Notes lost frames between two agents: a path over both ranks as if one were suspected."""
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
        """Returns the moment at which `expire` next has something to do; None: never."""
        return self._next_expiry

    @property
    def connected_agents(self) -> frozenset[AgentId]:
        return frozenset(self._connected)

    def is_connected(self, agent: AgentId) -> bool:
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
        """Returns the rank of the most serious impairment of an agent for a partition; 0: none."""
        return int(self.impairment_of(agent, partition) or 0)

    def mark_of(
        self, agent: AgentId, impairment: Impairment, partition: PartitionKey | None = None
    ) -> ImpairmentMark | None:
        """Returns an impairment of an agent as a whole, or of one partition on it."""
        known = self._agents.get(agent)
        return known.marks.get((partition, impairment)) if known is not None else None

    def are_severed(self, one: AgentId, other: AgentId) -> bool:
        """True if frames between two agents were lost recently."""
        return bool(self._severed) and frozenset((one, other)) in self._severed

    def impaired_by(self, impairment: Impairment) -> frozenset[AgentId]:
        """Returns the agents that have this impairment as a whole."""
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

        They are the least impaired of those that can serve it; empty only if none can.
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
        """Returns those of `agents` to plan on: unfit agents only if all are unfit.

        A draining agent is left out in any case; it serves until there is a plan without it.
        """
        staying = [each for each in agents if self.mark_of(each, Impairment.DRAINING) is None]
        fit = frozenset(agent for agent in staying if self.rank(agent) < UNFIT)
        return fit or frozenset(staying)

    def failure(self, agent: AgentId, partition: PartitionKey) -> str:
        """Returns the reason why an agent could not load a partition; empty if there is none."""
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

    def impairments(self, agent: AgentId) -> list[ImpairmentReport]:
        """Returns all impairments of an agent, the most serious first."""
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
        """Drops an empty record of an agent, so that agents that are gone take no memory."""
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
