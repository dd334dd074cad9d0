"""One live migration, as the agent that leads it keeps it in mind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catenary_agent.engine.inbound.intake import MAX_HOPS
from catenary_agent.generation.frames.intake import whole
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, InvalidInput, StaleEpoch, Unavailable

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import MoveSaid
    from catenary_agent.generation.state.session import Session
    from catenary_services.domain.ids import Nanoseconds


@dataclass(slots=True)
class Departure:
    """A move that is led here, until the session is handed over or stays."""

    session: Session
    begin: frame_pb2.SessionMove
    """The order; its opening is that of the new ring."""
    epoch: int
    deadline_ns: Nanoseconds
    started_ns: Nanoseconds
    waits: set[str] = field(default_factory=set)
    """Agents of the new ring that have not said READY to the last round."""
    known: int = 0
    """Tokens the new ring was told of; 0: it was told nothing yet."""
    asked: int = 0
    """Tokens of the last round."""
    added: int = 0
    """How many those were more than the ones of the round before."""
    rounds: int = 0
    is_armed: bool = False
    """It is handed over with its next token."""

    @property
    def session_id(self) -> int:
        """What the session becomes."""
        return self.begin.session_id

    @property
    def agents(self) -> list[str]:
        """The new ring."""
        return [hop.agent_id for hop in self.begin.opening.route]

    @property
    def others(self) -> list[str]:
        """The old ring, without its first agent."""
        return [hop.agent_id for hop in self.session.facts.ring[1:]]

    @property
    def told(self) -> list[str]:
        """Who has heard of the move."""
        followers = self.others if self.rounds and not self.begin.by_tokens else []
        return list(dict.fromkeys([*self.agents, *followers])) if self.known else []

    def introduce(self) -> None:
        """Puts all tokens but the newest into the opening."""
        opening = self.begin.opening
        opening.ClearField("token_ids")
        opening.ClearField("decode_route")
        opening.token_ids.extend(self.session.tokens[:-1])
        self.known = len(opening.token_ids)
        self.waits = set(self.agents)

    def next_round(self, least: int) -> bool:
        """Begins another round, unless what was added since the last is little, or no less.

        Rows travel while tokens are computed, so a round adds what was computed during the one
        before: it is worth another one as long as that shrinks by half.

        Args:
            least: So few tokens are little.
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
        """Returns a step for another agent.

        Args:
            kind: Which.
            agent_id: Ours.
            opens: With the opening.
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


def why_not(said: MoveSaid, session: Session | None, epoch: int) -> CatenaryError | None:
    """Returns why a move cannot begin; None if it can.

    Args:
        said: The order.
        session: What is to move, if it is here.
        epoch: Older orders are refused.
    """
    opening = said.move.opening
    if said.epoch < epoch:
        return StaleEpoch(f"epoch {said.epoch} is over; this agent obeys {epoch}")
    if session is None or session.leaves:
        return Unavailable("the session that was to move is over")
    facts = session.facts
    if not facts.is_first or facts.side == "prefill":
        return InvalidInput("moved_session_id", "the session does not begin here")
    ring, agents = whole(opening.route[:MAX_HOPS]), {hop.agent_id for hop in opening.route}
    if ring is None or ring != whole(facts.ring) or len(agents) != len(opening.route):
        return InvalidInput("route", "is no ring of the same model")
    known = min(len(opening.token_ids), len(session.tokens))
    if list(opening.token_ids[:known]) != session.tokens[:known]:
        return InvalidInput("token_ids", "are not those of the session")
    return None
