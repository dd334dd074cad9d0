"""The moves in progress, and why the latest ones failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from catenary_scheduler.dispatch.chained.tracking import Move
from catenary_services.domain.ids import AgentId, SessionId
from catenary_services.domain.plan import ChainHop

MoveFailure = Literal["deadline", "agent", "lost", "closed", "over"]
"""Reasons of failed moves. In order: not done in time; an agent said that it cannot; an agent is
gone; an agent said unasked that it is over; the request has ended or lost its session meanwhile."""
MOVE_COUNTERS = (
    "wanted_moves",
    "refused_moves",
    "started_moves",
    "kv_moves",
    "tokens_moves",
    "failed_moves",
    *(f"failed_moves_{each}" for each in get_args(MoveFailure)),
)
"""Counters of moves. In order: asked for by `MoveRequested`; not begun, whether asked for or not;
begun; done, by what travelled; failed, in all and by reason."""
_FAILURES = 256
"""Number of failed moves that are remembered."""


class MoveTable:
    """Moves of sessions.

    Attributes:
        ongoing: Moves in progress, by the session that the moving one becomes.
        at: Number of moves in progress that concern an agent.
        failures: Reasons of the latest failed moves, by the session that the moving one would have
            become.
    """

    def __init__(self) -> None:
        self.ongoing: dict[SessionId, Move] = {}
        self.at: dict[AgentId, int] = {}
        self.failures: dict[SessionId, MoveFailure] = {}

    def __len__(self) -> int:
        return len(self.ongoing)

    def to(self, session: SessionId) -> Move | None:
        """Returns the move that ends in a session; None if none does."""
        return self.ongoing.get(session)

    def begin(self, move: Move) -> None:
        """Adds a move."""
        move.source.moving = move
        self.ongoing[move.target.session_id] = move
        for agent in move.agents:
            self.at[agent] = self.at.get(agent, 0) + 1

    def end(self, move: Move) -> None:
        """Removes a move that is over, so that its agents have room for others."""
        move.source.moving = None
        del self.ongoing[move.target.session_id]
        for agent in move.agents:
            self.at[agent] -= 1
            if not self.at[agent]:
                del self.at[agent]

    def failed(self, move: Move, why: MoveFailure) -> None:
        """Removes a move that has failed, and remembers why."""
        self.end(move)
        self.failures[move.target.session_id] = why
        if len(self.failures) > _FAILURES:
            del self.failures[next(iter(self.failures))]

    def may_concern(self, hops: Iterable[ChainHop], most: int) -> bool:
        """True if each agent of these hops takes part in fewer than `most` moves."""
        return all(self.at.get(hop.agent, 0) < most for hop in hops)
