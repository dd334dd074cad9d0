"""The state of one live migration at the agent that leads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catenary_agent.engine.inbound.intake import MAX_HOPS
from catenary_agent.generation.frames.intake import whole
from catenary_agent.generation.state.states import LEAVING
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, InvalidInput, StaleEpoch, Unavailable

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import MoveMessage
    from catenary_agent.generation.state.session import Session
    from catenary_services.domain.ids import Nanoseconds


@dataclass(slots=True)
class OutgoingMigration:
    """A move that is led here, until the session is handed over or the move is given up."""

    session: Session
    begin: frame_pb2.SessionMove
    """The order to move; its opening names the new ring."""
    epoch: int
    deadline_ns: Nanoseconds
    started_ns: Nanoseconds
    waits: set[str] = field(default_factory=set)
    """Agents of the new ring that have not answered the last round with READY."""
    known: int = 0
    """Number of tokens the new ring was sent; 0 if it was not asked for room yet."""
    asked: int = 0
    """Number of cached tokens that the last round asked for."""
    added: int = 0
    """Number of tokens by which the last round exceeded the one before."""
    rounds: int = 0
    is_armed: bool = False
    """True if the session is handed over at its next token."""

    @property
    def session_id(self) -> int:
        """The id the session gets on the new ring."""
        return self.begin.session_id

    @property
    def agents(self) -> list[str]:
        """The agents of the new ring, in order."""
        return [hop.agent_id for hop in self.begin.opening.route]

    @property
    def others(self) -> list[str]:
        """The agents of the old ring except the first."""
        return [hop.agent_id for hop in self.session.spec.ring[1:]]

    @property
    def told(self) -> list[str]:
        """The agents that were told of the move."""
        followers = self.others if self.rounds and not self.begin.by_tokens else []
        return list(dict.fromkeys([*self.agents, *followers])) if self.known else []

    def introduce(self) -> None:
        """Fills the opening with all tokens except the newest."""
        opening = self.begin.opening
        opening.ClearField("token_ids")
        opening.ClearField("decode_route")
        opening.token_ids.extend(self.session.tokens[:-1])
        self.known = len(opening.token_ids)
        self.waits = set(self.agents)

    def next_round(self, least: int) -> bool:
        """Begins another round, unless few tokens were added since the last, or over half as many.

        Rows travel while tokens are computed, so a round adds what was computed during the round
        before. Another round is worthwhile as long as that number halves.

        Args:
            least: At most this many added tokens count as few.

        Returns:
            True if another round has begun.
        """
        cached = len(self.session.tokens) - 1
        added = cached - self.asked
        if self.rounds and (added <= least or 2 * added > self.added):
            return False
        self.rounds, self.added, self.asked = self.rounds + 1, added, cached
        self.waits = set(self.agents)
        return True

    def step(
        self, kind: frame_pb2.SessionMove.Step.ValueType, agent_id: str, *, opens: bool = False
    ) -> frame_pb2.SessionMove:
        """Returns a step of this move to be sent to another agent.

        Args:
            kind: The kind of the step.
            agent_id: The id of this agent.
            opens: Whether the step carries the opening.
        """
        return frame_pb2.SessionMove(
            session_id=self.begin.session_id,
            moved_session_id=self.begin.moved_session_id,
            step=kind,
            by_tokens=self.begin.by_tokens,
            opening=self.begin.opening if opens else None,
            agent_id=agent_id,
            from_agent_ids=[agent_id, *self.others] if opens else (),
        )


def why_not(said: MoveMessage, session: Session | None, epoch: int) -> CatenaryError | None:
    """Returns why a move cannot begin; None if it can.

    Args:
        said: The order.
        session: The session to be moved; None if it is not here.
        epoch: The highest epoch seen; orders of an older one are refused.
    """
    opening = said.move.opening
    if said.epoch < epoch:
        return StaleEpoch(f"epoch {said.epoch} is over; this agent obeys {epoch}")
    if session is None or session.state is LEAVING:
        return Unavailable("the session that was to move is over")
    spec = session.spec
    if not spec.is_first or spec.side == "prefill":
        return InvalidInput("moved_session_id", "the session does not begin here")
    ring, agents = whole(opening.route[:MAX_HOPS]), {hop.agent_id for hop in opening.route}
    if ring is None or ring != whole(spec.ring) or len(agents) != len(opening.route):
        return InvalidInput("route", "is no ring of the same model")
    known = min(len(opening.token_ids), len(session.tokens))
    if list(opening.token_ids[:known]) != session.tokens[:known]:
        return InvalidInput("token_ids", "are not those of the session")
    return None
