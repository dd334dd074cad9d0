"""For how long work goes elsewhere after an agent failed sessions.

A session fails when an agent cannot be reached by the one before it, often a moment before the
scheduler hears that it is gone. Started again at once on the same chain, a request would use up its
restarts within milliseconds. So the agent counts as suspected for a while: others are preferred,
and a request that failed where there are no others waits for the end of the suspicion. An agent
whose device fails is suspected like any other, and `dispatch.breaker` counts it besides: that holds
for longer, and for the partition alone.
"""

from __future__ import annotations

from scheduler.dispatch.availability import Availability, Impairment
from scheduler.dispatch.chained.config import ChainedConfig
from services.domain.ids import AgentId, Nanoseconds
from services.domain.plan import ChainHop


class FailureBackoff:
    """Suspects agents for longer with every failure in a row.

    Nobody is suspected for ever: sessions are the only test there is.
    """

    def __init__(self, config: ChainedConfig, availability: Availability) -> None:
        self._config = config
        self._availability = availability
        self._failures: dict[AgentId, int] = {}

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

    def worked(self, hops: tuple[ChainHop, ...]) -> None:
        """A session came to its end on these agents: the next failure is a first one."""
        if self._failures:
            for hop in hops:
                self._failures.pop(hop.agent, None)

    def forget(self, agent: AgentId) -> None:
        """The agent is gone; whoever comes back under its name starts anew."""
        self._availability.clear(agent, Impairment.SUSPECTED)
        self._failures.pop(agent, None)
