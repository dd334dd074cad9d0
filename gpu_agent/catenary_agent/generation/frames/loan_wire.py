"""Frames about caches in memory that agents of one host lend each other; they have no payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from catenary_agent.generation.frames.peers import Priority, SessionFrame
from catenary_protos.catenary.v1 import frame_pb2

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import LentOut, LoanOut


@dataclass(slots=True)
class LentFrame(SessionFrame):
    """A part of a session's caches that lies in lent memory; it stays behind those in frames."""

    KIND = frame_pb2.FRAME_KIND_SESSION_CACHE
    out: LentOut

    @property
    def session_ids(self) -> tuple[int, ...]:
        return (self.out.session_id,)

    @property
    def priority(self) -> Priority:
        return Priority.CACHES

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        span, cache = self.out.span, header.cache
        cache.session_id = self.out.session_id
        cache.first_block, cache.last_block = span.first_block, span.last_block
        cache.first_token, cache.last_token = span.first_token, span.last_token
        cache.datatype = self.out.datatype
        cache.lent.CopyFrom(self.out.piece)


@dataclass(slots=True)
class LoanFrame(SessionFrame):
    """A message of one agent to another about lent memory; nothing fails with it."""

    KIND = frame_pb2.FRAME_KIND_CACHE_LOAN
    out: LoanOut

    @property
    def session_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def priority(self) -> Priority:
        # The frame in front opens the session that an offer names.
        is_offer = self.out.loan.step == frame_pb2.CacheLoan.STEP_OFFER
        return Priority.CACHES if is_offer else Priority.RINGS

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        header.loan.CopyFrom(self.out.loan)
