"""The common base of the frames of sessions, whatever they carry."""

from __future__ import annotations

import time
from typing import ClassVar

from catenary_protos.catenary.v1 import frame_pb2


class SessionFrame:
    """A frame for one agent or gateway; without further words it has no payload and cannot wait."""

    __slots__ = ()

    KIND: ClassVar[frame_pb2.FrameKind.ValueType]
    CARRIES_CACHE: ClassVar[bool] = False
    """Whether the scheduler is told how long it took to leave."""

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return 0

    @property
    def session_ids(self) -> tuple[int, ...]:
        """The sessions, by their ids at the receiver, that fail if this cannot be delivered."""
        raise NotImplementedError

    @property
    def can_wait(self) -> bool:
        """True if frames that keep rings going may overtake it."""
        return False

    def fill(self, view: memoryview) -> None:
        """Writes the payload. This runs on the event loop, so payloads are small."""

    def settle(self) -> None:
        """Notes that the frame has left or was given up."""

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        """Fills in the fields of the header that only this kind of frame has.

        Args:
            header: The header, with the time of sending.
            agent_id: The id of this agent.
        """
        raise NotImplementedError

    def header(self, epoch: int, agent_id: str) -> bytes:
        """Returns the encoded header, with the current time as the time of sending."""
        now = time.monotonic_ns()
        header = frame_pb2.FrameHeader(kind=self.KIND, epoch=epoch, sent_monotonic_ns=now)
        self.describe(header, agent_id)
        return header.SerializeToString()
