"""The one view of which agents can be given what: read by planner, dispatcher and status alike.

An agent can serve a partition while it is connected and has the partition loaded. Beyond that,
something may speak against giving it work: an *impairment*, of the whole agent or of one partition
on it, from slow to untrustworthy. Whoever chooses among the members of a stage gets those with
the least serious impairment, so that an impairment steers work to others where there are others,
and never takes the last member a stage has. Pure; moments are given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.domain.ids import AgentId, Nanoseconds, PartitionKey


class Impairment(enum.IntEnum):
    """What speaks against giving work to an agent, from the least to the most serious."""

    STRAGGLING = 1
    """It computes much more slowly than is booked for it."""
    SILENT = 2
    """It has not been heard of for a while, though its stream is open."""
    DRAINING = 3
    """It is to go."""
    BROKEN = 4
    """Its executor fails again and again, or is stuck."""
    QUARANTINED = 5
    """It said what cannot be true."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One impairment: until when it holds, and why, in words for people."""

    until: Nanoseconds | None
    """None: until it is cleared."""
    why: str


@dataclass(slots=True)
class _Known:
    """What is known of one agent; `None` as a partition stands for all it has."""

    loaded: set[PartitionKey] = field(default_factory=set)
    marks: dict[tuple[PartitionKey | None, Impairment], Mark] = field(default_factory=dict)


class Availability:
    """Per agent and partition: connected, loaded, impaired by what.

    Impairments survive a disconnection: an agent that comes back is as impaired as it went.
    """

    def __init__(self) -> None:
        self._agents: dict[AgentId, _Known] = {}
        self._connected: set[AgentId] = set()
        self.version = 0
        """Grows with every change; who has seen this version need not ask again."""

    # ---- what happened ----

    def connected(self, agent: AgentId) -> None:
        """An agent said hello; it has loaded nothing until that is said."""
        self._connected.add(agent)
        self._of(agent).loaded.clear()
        self.version += 1

    def disconnected(self, agent: AgentId) -> None:
        """An agent is gone, and what it had loaded with it."""
        self._connected.discard(agent)
        self._of(agent).loaded.clear()
        self.version += 1

    def loaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """An agent can serve a partition."""
        self._of(agent).loaded.add(partition)
        self.version += 1

    def unloaded(self, agent: AgentId, partition: PartitionKey) -> None:
        """An agent does not have a partition any more."""
        self._of(agent).loaded.discard(partition)
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
        self._of(agent).marks[partition, impairment] = Mark(until, why)
        self.version += 1

    def clear(
        self, agent: AgentId, impairment: Impairment, *, partition: PartitionKey | None = None
    ) -> None:
        """It does not any more."""
        if self._of(agent).marks.pop((partition, impairment), None) is not None:
            self.version += 1

    def expire(self, now: Nanoseconds) -> None:
        """Clears the impairments whose time is over."""
        for known in self._agents.values():
            over = [k for k, m in known.marks.items() if m.until is not None and m.until <= now]
            for key in over:
                del known.marks[key]
                self.version += 1

    # ---- what is asked ----

    def impairment_of(
        self, agent: AgentId, partition: PartitionKey | None = None
    ) -> Impairment | None:
        """Returns the most serious impairment of an agent for a partition, if any."""
        known = self._agents.get(agent)
        if known is None:
            return None
        mine = [each for part, each in known.marks if part is None or part == partition]
        return max(mine, default=None)

    def can_serve(self, agent: AgentId, partition: PartitionKey) -> bool:
        """True if an agent is connected and has a partition loaded, however impaired."""
        known = self._agents.get(agent)
        return agent in self._connected and known is not None and partition in known.loaded

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
        rank = {agent: self.impairment_of(agent, partition) or 0 for agent in agents}
        best = min(rank.values(), default=0)
        return tuple(agent for agent, each in rank.items() if each == best)

    def _of(self, agent: AgentId) -> _Known:
        return self._agents.setdefault(agent, _Known())
