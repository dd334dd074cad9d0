"""Agents that failed sessions, and for how long they are left alone.

A session fails when an agent cannot be reached by the one before it, often a moment before the
scheduler hears that it is gone. Started again at once on the same chain, a request would use up its
restarts within milliseconds.
"""

from __future__ import annotations

from scheduler.dispatch.chained.config import ChainedConfig
from services.domain.ids import AgentId, Nanoseconds
from services.domain.plan import ChainHop


class Distrust:
    """Who is left alone until when. Nobody is for ever: sessions are the only test there is."""

    def __init__(self, config: ChainedConfig) -> None:
        self._config = config
        self._until: dict[AgentId, Nanoseconds] = {}
        self._failures: dict[AgentId, int] = {}

    def __contains__(self, agent: AgentId) -> bool:
        return agent in self._until

    def failed(self, agent: AgentId, now: Nanoseconds) -> bool:
        """Leaves an agent alone for a while; False if it is already."""
        if agent in self._until:
            return False
        failures = self._failures.get(agent, 0)
        self._failures[agent] = failures + 1
        pause = self._config.distrust_ns << min(failures, 16)
        self._until[agent] = now + min(self._config.longest_distrust_ns, pause)
        return True

    def worked(self, hops: tuple[ChainHop, ...]) -> None:
        """A session came to its end on these agents: the next failure is a first one."""
        if self._failures:
            for hop in hops:
                self._failures.pop(hop.agent, None)

    def forget(self, agent: AgentId) -> None:
        """The agent is gone; whoever comes back under its name starts anew."""
        self._until.pop(agent, None)
        self._failures.pop(agent, None)

    def next(self) -> Nanoseconds | None:
        """When `end` has something to do."""
        return min(self._until.values()) if self._until else None

    def end(self, now: Nanoseconds) -> bool:
        """Trusts those again whose time is over; True if there were any."""
        over = [agent for agent, until in self._until.items() if until <= now]
        for agent in over:
            del self._until[agent]
        return bool(over)
