"""What agents say of the epoch they obey: followed, waited with, or a lie.

An agent that obeys a higher epoch than ours has met another leader, or Redis forgot an epoch it
had granted; then ours must go beyond it, or the agent takes no orders. An agent may also be wrong
or lie, and then going beyond is just what it wants: epochs are numbers, and numbers end. So:

* what no cluster gets to (`HIGHEST_GRANTED`), or lies too far from ours, is never followed;
* a claim nearby is followed, but not again and again: who is obeyed has no higher one to claim;
* a claim in between is followed if no agent contradicts it. When Redis forgot, all agents that
  were there obey the old epoch; where others obey ours, or one we knew of, it did not forget.
  Who would contradict may be about to arrive, so that is waited for.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Final

from catenary_services.domain.groups import EPOCH_STRIDE, FARTHEST_EPOCH, HIGHEST_GRANTED
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Epoch, Nanoseconds

NEARBY: Final = 1024 * EPOCH_STRIDE
"""So many epochs a Redis may forget without anybody asking who else remembers them."""
_MOST_CLAIMS: Final = 3
"""Of one agent in one term, that are followed: a leader that met three others is very unlucky."""
_HEARING_NS: Final = 2 * NANOSECONDS_PER_SECOND
"""Agents come back to a new leader within this."""
_MOST_AGENTS: Final = 10_000


class ClaimDecision(enum.Enum):
    """What to do about a claim."""

    OBEYS = enum.auto()
    """It obeys no other than us."""
    FOLLOW = enum.auto()
    """Our epoch must go beyond it."""
    WAIT = enum.auto()
    """Others are to be heard first; it comes again."""
    LIE = enum.auto()
    """It cannot be true."""


@dataclass(frozen=True, slots=True)
class EpochClaim:
    """An agent obeys an epoch, of a leader that it may name; "": it names none."""

    agent: AgentId
    epoch: int
    leader: str = ""


class EpochClaims:
    """The claims made to one leader in one term. Pure; moments are given."""

    def __init__(self) -> None:
        self._agreeing: set[AgentId] = set()
        """Agents that came with an epoch, and it was none above ours."""
        self._followed: Counter[AgentId] = Counter()
        self._since: dict[AgentId, Nanoseconds] = {}

    def judge(
        self, claim: EpochClaim, ours: Epoch, own_leader: str, now: Nanoseconds
    ) -> ClaimDecision:
        """Returns what to do about a claim; asks nobody else.

        Args:
            claim: What an agent says.
            ours: The present epoch.
            own_leader: What names us as its leader.
            now: Monotonic.
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
