"""Reception of session frames: their bytes are counted, and given back exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_agent.generation.frames import intake
from catenary_agent.generation.state.events import SessionsBroken
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError

if TYPE_CHECKING:
    from catenary_agent.engine.inbound.memory import HeldBatches
    from catenary_agent.generation.state.events import Event
    from catenary_agent.generation.state.session import Hidden
    from catenary_services.transport.interface import ReceivedFrame


class FrameReceiver:
    """Converts received frames to events.

    Hidden states are copied and their frames released at once. Parts of caches are read in place on
    the generation thread; the handler of the event has the frame released.
    """

    def __init__(self, agent_id: str, held: HeldBatches) -> None:
        """Counts the bytes of received tensors in `held`."""
        self._agent_id = agent_id
        self._held = held

    def events(
        self, header: frame_pb2.FrameHeader, frame: ReceivedFrame, epoch: int
    ) -> Sequence[Event]:
        """Returns the events of a frame.

        Args:
            header: The decoded header of the frame.
            frame: The frame; it is released here, except for parts of caches.
            epoch: Sessions of an older epoch may not begin here as their first hop.
        """
        arrived = intake.arrival(header, frame)
        if header.kind == frame_pb2.FRAME_KIND_SESSION_TOKENS:
            frame.release()
            return intake.token_events(header, arrived, self._agent_id, epoch)
        if header.kind == frame_pb2.FRAME_KIND_SESSION_MOVE:
            frame.release()
            epochs = (header.epoch, epoch)
            return (intake.move_said(header.move, arrived, self._agent_id, epochs),)
        if header.kind == frame_pb2.FRAME_KIND_SESSION_CACHE:
            try:
                self._held.claim(len(frame.payload))
            except CatenaryError as error:
                frame.release()
                return (SessionsBroken((header.cache.session_id,), error, self._agent_id),)
            return intake.cache_events(header, frame, arrived, self._agent_id, epoch)
        try:
            rows = self._rows_of(header, frame)
        except CatenaryError as error:
            ids = tuple(each.session_id for each in header.session_rows)
            return (SessionsBroken(ids, error, self._agent_id),)
        return intake.step_events(header, rows, arrived, self._agent_id, epoch)

    def _rows_of(self, header: frame_pb2.FrameHeader, frame: ReceivedFrame) -> Hidden:
        """Returns a copy of the rows, counted as held, and releases the frame."""
        try:
            self._held.claim(len(frame.payload))
            try:
                return intake.rows_of_payload(header, frame.payload)
            except CatenaryError as error:
                self._held.give_back(len(frame.payload))
                error.__traceback__ = None  # its frames hold views of the payload
                raise
        finally:
            frame.release()
