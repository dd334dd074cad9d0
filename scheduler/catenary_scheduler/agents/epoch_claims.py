"""Judges the epochs that agents claim to obey: followed, waited with, or refused as a lie.

An agent that obeys a higher epoch than ours has met another leader, or Redis forgot an epoch it had
granted; then ours must go beyond it, or the agent takes no orders. An agent may also be wrong or
lie, and then going beyond is just what it wants: epochs are numbers, and numbers end. So:

* A claim that no cluster reaches (`HIGHEST_GRANTED`), or too far from ours, is never followed.
* A claim nearby is followed, but only a few times per agent: an agent that is obeyed has no higher
  epoch to claim.
* A claim in between is followed if no agent contradicts it. When Redis forgot, all agents that were
  there obey the old epoch; where others obey ours, or one we knew of, it did not forget. An agent
  that would contradict may be about to connect, so the judgement waits for it.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Final

from catenary_services.domain.groups import EPOCH_STRIDE, FARTHEST_EPOCH, HIGHEST_GRANTED
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Epoch, Nanoseconds

NEARBY: Final = 1024 * EPOCH_STRIDE
"""Redis may forget this many epochs without other agents having to confirm the claim."""
_MOST_CLAIMS: Final = 3
"""Claims of one agent in one term that are followed; a leader that met three others is very
unlucky."""
_HEARING_NS: Final = 2 * NANOSECONDS_PER_SECOND
"""Time within which agents come back to a new leader."""
_MOST_AGENTS: Final = 10_000


class ClaimDecision(enum.Enum):
    """The reaction to a claim."""

    OBEYS = enum.auto()
    """The agent obeys no epoch above ours."""
    FOLLOW = enum.auto()
    """Our epoch must go beyond the claimed one."""
    WAIT = enum.auto()
    """Other agents are to be heard first; the agent claims again."""
    LIE = enum.auto()
    """The claim cannot be true."""


@dataclass(frozen=True, slots=True)
class EpochClaim:
    """An epoch that an agent obeys, and its leader; "" if the agent names none."""

    agent: AgentId
    epoch: int
    leader: str = ""


class EpochClaims:
    """The claims made to one leader in one term; moments are passed in, and no I/O is done."""

    def __init__(self) -> None:
        self._agreeing: set[AgentId] = set()
        """Agents that claimed an epoch not above ours."""
        self._followed: Counter[AgentId] = Counter()
        self._since: dict[AgentId, Nanoseconds] = {}

    def judge(
        self, claim: EpochClaim, ours: Epoch, own_leader: str, now: Nanoseconds
    ) -> ClaimDecision:
        """Returns the reaction to a claim.

        Args:
            claim: The agent's claim.
            ours: The present epoch.
            own_leader: The name by which agents know this leader.
            now: The moment, on the monotonic clock.
        """
        agent = claim.agent
        is_shared = claim.epoch == ours and claim.leader not in ("", own_leader)
        if claim.epoch <= ours and not is_shared:
            if claim.epoch > 0 and len(self._agreeing) < _MOST_AGENTS:
                self._agreeing.add(agent)
            self._since.pop(agent, None)
            return ClaimDecision.OBEYS
        ahead = claim.epoch - ours
        if claim.epoch > HIGHEST_GRANTED or ahead > FARTHEST_EPOCH:
            return ClaimDecision.LIE
        if self._followed[agent] >= _MOST_CLAIMS or len(self._followed) > _MOST_AGENTS:
            return ClaimDecision.LIE
        if ahead > NEARBY:
            if self._agreeing - {agent}:
                return ClaimDecision.LIE
            if len(self._since) < _MOST_AGENTS:
                self._since.setdefault(agent, now)
            if now - self._since.get(agent, now) < _HEARING_NS:
                return ClaimDecision.WAIT
        self._followed[agent] += 1
        return ClaimDecision.FOLLOW
