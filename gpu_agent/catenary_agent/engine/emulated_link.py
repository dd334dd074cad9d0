"""An emulated network card, for frames between agents of one machine.

Emulated devices stand for GPUs in separate servers, but their frames cross shared memory in hardly
any time. With an emulated link they take as long as the speed of the link demands: one after the
other on the sender's uplink, one after the other on the receiver's downlink, and each frame on both
at the same time. Frames from and to gateways are not delayed, as in the scheduler's book.

The bytes still cross the real transport, which must be faster than the emulated link.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError
from catenary_services.transport.frames import read_header

if TYPE_CHECKING:
    from catenary_services.transport.interface import FrameHandler, ReceivedFrame

_NS = 1_000_000_000


class EmulatedLink:
    """The uplink and the downlink of one agent.

    Args:
        bytes_per_second: Speed of each direction.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._ns_per_byte = _NS / bytes_per_second
        self._uplink_free_ns = 0
        self._downlink_free_ns = 0
        self._under_way: dict[ReceivedFrame, asyncio.TimerHandle] = {}

    async def turn(self, nbytes: int) -> None:
        """Returns when the previous frames have left the uplink and this one may start."""
        now = time.monotonic_ns()
        start = max(now, self._uplink_free_ns)
        self._uplink_free_ns = start + round(nbytes * self._ns_per_byte)
        if start > now:
            await asyncio.sleep((start - now) / _NS)

    def on_frame(self, frame: ReceivedFrame, take: FrameHandler) -> None:
        """Passes on a frame: at once from a gateway, after its last byte from an agent."""
        try:
            header = read_header(frame)
        except CatenaryError:
            take(frame)  # the receiver reports the error
            return
        is_feature_map = header.kind == frame_pb2.FRAME_KIND_FEATURE_MAP
        from_gateway = header.position == 0 and is_feature_map
        if from_gateway or not len(frame.payload):  # gateways open sessions without a payload
            take(frame)
            return
        now = time.monotonic_ns()
        sent = header.sent_monotonic_ns if frame.capabilities.same_host else now
        arrives = max(sent, self._downlink_free_ns) + round(len(frame.payload) * self._ns_per_byte)
        self._downlink_free_ns = arrives
        delay_s = max(0, arrives - now) / _NS
        loop = asyncio.get_running_loop()
        self._under_way[frame] = loop.call_later(delay_s, self._arrived, frame, take)

    def close(self) -> None:
        """Drops the frames in transit."""
        for frame, timer in self._under_way.items():
            timer.cancel()
            frame.release()
        self._under_way.clear()

    def _arrived(self, frame: ReceivedFrame, take: FrameHandler) -> None:
        del self._under_way[frame]
        take(frame)
