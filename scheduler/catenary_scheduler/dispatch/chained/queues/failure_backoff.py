"""Avoids agents and links for a while after they failed sessions.

A session fails when an agent cannot be reached by the one before it, often a moment before the
scheduler hears that it is gone. Started again at once on the same chain, a request would use up its
restarts within milliseconds. So the agent counts as suspected for a while: others are preferred,
and a request that failed where there are no others waits for the end of the suspicion. An agent
whose device fails is suspected like any other, and in addition `dispatch.breaker` counts the
failure: that lasts longer, and concerns the partition alone. Where one agent cannot reach another,
both may work well with all others: then their link is avoided, and for longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_services.domain.ids import AgentId, Nanoseconds
from catenary_services.domain.plan import ChainHop


class FailureBackoff:
    """Suspects agents and links, for twice as long with every failure in a row.

    No suspicion lasts for ever: sessions are the only test there is.
    """

    def __init__(self, config: ChainedConfig, availability: Availability) -> None:
        self._config = config
        self._availability = availability
        self._failures: dict[AgentId, int] = {}
        self._broken: dict[tuple[AgentId, AgentId], int] = {}
        """Number of failures in a row of the frames between two agents, by their sorted names."""

    def failed(self, agent: AgentId, now: Nanoseconds) -> bool:
        """Suspects an agent for a while; False if it is suspected already."""
        if self._availability.mark_of(agent, Impairment.SUSPECTED) is not None:
            return False
        failures = self._failures.get(agent, 0)
        self._failures[agent] = failures + 1
        pause = self._config.suspicion_ns << min(failures, 16)
        until = now + min(self._config.longest_suspicion_ns, pause)
        why = "a session failed there" if not failures else f"{failures + 1} sessions failed there"
        self._availability.impair(agent, Impairment.SUSPECTED, until=until, why=why)
        return True

    def link_failed(self, one: AgentId, other: AgentId, now: Nanoseconds) -> bool:
        """Avoids the link between two agents for a while; False if it is avoided already."""
        if self._availability.are_severed(one, other):
            return False
        pair = _pair(one, other)
        failures = self._broken.get(pair, 0)
        self._broken[pair] = failures + 1
        pause = self._config.link_suspicion_ns << min(failures, 16)
        until = now + min(self._config.longest_suspicion_ns, pause)
        self._availability.sever(*pair, until, f"no frames between {pair[0]} and {pair[1]}")
        return True

    def worked(self, hops: tuple[ChainHop, ...]) -> None:
        """Notes that a session ended well on these agents: the next failure is a first one."""
        if self._failures:
            for hop in hops:
                self._failures.pop(hop.agent, None)
        if self._broken:
            for one, other in links_of(hops):
                self._broken.pop(_pair(one, other), None)

    def forget(self, agent: AgentId) -> None:
        """Forgets an agent that is gone; its successor of the same name starts anew."""
        self._availability.clear(agent, Impairment.SUSPECTED)
        self._failures.pop(agent, None)
        for pair in [each for each in self._broken if agent in each]:
            del self._broken[pair]


def links_of(hops: Sequence[ChainHop]) -> list[tuple[AgentId, AgentId]]:
    """Returns the pairs of agents that exchange frames: each with the next, round the ring."""
    agents = [hop.agent for hop in hops]
    following = agents[1:] + agents[:1]
    return [(one, other) for one, other in zip(agents, following, strict=True) if one != other]


def _pair(one: AgentId, other: AgentId) -> tuple[AgentId, AgentId]:
    return (one, other) if one < other else (other, one)
