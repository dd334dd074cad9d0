"""Links between servers as agents measured them, for planners.

What agents state of their network cards bounds what was measured, and where nothing was measured it
is all that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from catenary_services.domain.ids import ModelKey, Nanoseconds, ServerId
from catenary_services.domain.plan import Agent

LOCAL_WAY_NS = 250_000
"""Nanoseconds of a way that is part of what a frame usually takes: the half of a round trip between
agents in one place. The rest of it is their work, which a longer way does not shorten."""
ServerPair = tuple[ServerId, ServerId]
"""The server that sends, and the one that receives."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Measured figures of the link from one server to another."""

    round_trip_ns: Nanoseconds
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class ServerLinks:
    """All measured links of a cluster; pickled for the solver."""

    figures: Mapping[ServerPair, LinkFigures] = field(default_factory=dict)

    def longer_ns(self, source: ServerId, target: ServerId) -> float:
        """Returns by how many nanoseconds a frame is longer on its way than in one place.

        It is the same in both directions, and 0 if nobody measured the link.
        """
        found = self.figures.get((source, target)) or self.figures.get((target, source))
        return _longer_ns(found) if found is not None and source != target else 0.0

    def rate(self, source: ServerId, target: Agent) -> int:
        """Returns the bytes per second from a server to an agent: the lesser of two figures.

        One is what the agent states of its network card, the other what was measured; 0 if neither
        is known.
        """
        found = self.figures.get((source, target.server))
        known = [target.link_bytes_per_second]
        if found is not None and source != target.server:
            known.append(found.bytes_per_second)
        return min((each for each in known if each > 0), default=0)

    def factors(
        self, agents: Iterable[Agent], usual_ns: float
    ) -> dict[tuple[ModelKey | str, str], float]:
        """Returns by how much longer the links between agents' servers take than is assumed.

        Args:
            agents: The agents, with what they state of their network cards.
            usual_ns: Nanoseconds that a frame is assumed to take from agent to agent.
        """
        stated: dict[ServerId, int] = {}
        for agent in agents:
            rate = agent.link_bytes_per_second
            stated[agent.server] = min(rate, stated.get(agent.server, rate))
        found: dict[tuple[ModelKey | str, str], float] = {}
        for (source, target), link in self.figures.items():
            if source in stated and target in stated:
                name = f"the link from {source} to {target}"
                found["a frame", name] = (usual_ns + _longer_ns(link)) / usual_ns
                found["a prompt", name] = max(1.0, stated[target] / max(1, link.bytes_per_second))
        return found

    def seen(self, agents: Iterable[Agent]) -> tuple[Agent, ...]:
        """Returns agents with the rate of their network card as far as it was measured.

        A card is as fast as the fastest link over it, in the direction in which that is slower: the
        other ends of slower links may be what makes them slow.
        """
        best: dict[tuple[ServerId, bool], int] = {}
        for (source, target), found in self.figures.items():
            for end in ((source, True), (target, False)):
                best[end] = max(best.get(end, 0), found.bytes_per_second)
        return tuple(_limited(agent, best) for agent in agents)


def _longer_ns(link: LinkFigures) -> float:
    return max(0.0, link.round_trip_ns / 2 - LOCAL_WAY_NS)


def _limited(agent: Agent, best: Mapping[tuple[ServerId, bool], int]) -> Agent:
    rates = [best[end] for sends in (True, False) if (end := (agent.server, sends)) in best]
    rate = min([agent.link_bytes_per_second, *rates])
    return (
        agent if rate == agent.link_bytes_per_second else replace(agent, link_bytes_per_second=rate)
    )


NO_LINKS = ServerLinks()
"""The links of a cluster in which none has been measured."""
