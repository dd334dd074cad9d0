"""Reception of session frames: one table says who may send each kind and how it is read.

The bytes of received tensors are counted, and given back exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from catenary_agent.generation.frames import intake
from catenary_agent.generation.state.events import CacheLent, LoanMessage, SessionsBroken
from catenary_protos.catenary.v1 import frame_pb2
from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
from catenary_services.errors import CatenaryError

if TYPE_CHECKING:
    from catenary_agent.engine.inbound.memory import HeldBatches
    from catenary_agent.generation.frames.members import FrameFilter
    from catenary_agent.generation.state.events import Event
    from catenary_agent.generation.state.session import Hidden
    from catenary_services.transport.interface import FrameSender, ReceivedFrame


class FrameKind(NamedTuple):
    """The handling of the frames of one kind: a check of the sender, then the reading."""

    admits: Callable[[FrameHeader, str], bool]
    """Whether a peer may speak of all sessions in a frame."""
    read: Callable[[FrameHeader, ReceivedFrame, int], Sequence[Event]]
    """Returns the events of a frame; see `FrameReceiver.events`."""


class FrameReceiver:
    """Converts received frames to events.

    Hidden states are copied and their frames released at once. Parts of caches are read in place on
    the generation thread; the handler of the event has the frame released.
    """

    def __init__(self, agent_id: str, held: HeldBatches, members: FrameFilter) -> None:
        """Counts the bytes of received tensors in `held`; `members` says who may send."""
        self._agent_id = agent_id
        self._held = held
        self.kinds: Mapping[int, FrameKind] = {
            frame_pb2.FRAME_KIND_SESSION_STEP: FrameKind(
                lambda header, peer: members.admits(header.session_rows, peer), self._step
            ),
            frame_pb2.FRAME_KIND_SESSION_TOKENS: FrameKind(
                lambda header, peer: members.admits(header.session_tokens, peer), self._tokens
            ),
            frame_pb2.FRAME_KIND_SESSION_CACHE: FrameKind(
                lambda header, peer: members.admits_cache(header.cache, peer), self._cache
            ),
            frame_pb2.FRAME_KIND_CACHE_LOAN: FrameKind(
                lambda header, peer: members.admits_loan(header.loan, peer), self._loan
            ),
            frame_pb2.FRAME_KIND_SESSION_MOVE: FrameKind(
                lambda header, peer: members.admits_move(header.move, peer), self._move
            ),
        }
        """Every kind of frame that sessions have. No other reaches this receiver."""

    def admits(self, header: FrameHeader, sender: FrameSender) -> bool:
        """Returns True if a sender may speak of all sessions in a frame; nameless ones may."""
        return not sender.name or self.kinds[header.kind].admits(header, sender.name)

    def events(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        """Returns the events of a frame.

        Args:
            header: The decoded header of the frame.
            frame: The frame; it is released here, except for parts of caches.
            epoch: Sessions of an older epoch may not begin here as their first hop.
        """
        return self.kinds[header.kind].read(header, frame, epoch)

    def _tokens(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        arrived = intake.arrival(header, frame)
        frame.release()
        return intake.token_events(header, arrived, self._agent_id, epoch)

    def _move(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        arrived = intake.arrival(header, frame)
        frame.release()
        return (intake.move_said(header.move, arrived, self._agent_id, (header.epoch, epoch)),)

    def _loan(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        frame.release()
        return (LoanMessage(header.loan),)

    def _lent(self, header: FrameHeader, frame: ReceivedFrame) -> Sequence[Event]:
        frame.release()
        cache = header.cache
        return (CacheLent(cache.session_id, intake.span_of(cache), cache.datatype, cache.lent),)

    def _cache(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        if header.cache.HasField("lent"):
            return self._lent(header, frame)
        arrived = intake.arrival(header, frame)
        try:
            self._held.claim(len(frame.payload))
        except CatenaryError as error:
            frame.release()
            return (SessionsBroken((header.cache.session_id,), error, self._agent_id),)
        return intake.cache_events(header, frame, arrived, self._agent_id, epoch)

    def _step(self, header: FrameHeader, frame: ReceivedFrame, epoch: int) -> Sequence[Event]:
        arrived = intake.arrival(header, frame)
        try:
            rows = self._rows_of(header, frame)
        except CatenaryError as error:
            ids = tuple(each.session_id for each in header.session_rows)
            return (SessionsBroken(ids, error, self._agent_id),)
        return intake.step_events(header, rows, arrived, self._agent_id, epoch)

    def _rows_of(self, header: FrameHeader, frame: ReceivedFrame) -> Hidden:
        """Returns a copy of the rows, counted as held, and releases the frame."""
        try:
            nbytes = len(frame.payload) * (2 if intake.is_narrowed(header) else 1)
            self._held.claim(nbytes)
            try:
                return intake.rows_of_payload(header, frame.payload)
            except CatenaryError as error:
                self._held.give_back(nbytes)
                error.__traceback__ = None  # its frames hold views of the payload
                raise
        finally:
            frame.release()
