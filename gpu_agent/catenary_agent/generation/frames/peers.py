"""Session frames and their delivery: two bounded lines per peer, each in order.

Parts of caches are large and can wait. All other frames keep rings going and overtake them. So does
the last part of the cache of a session that moves: it is small, and the session stands still until
it arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    PartitionLost,
    Unavailable,
)
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.engine.emulated_link import EmulatedLink
    from catenary_agent.engine.outbound import LinkHub
    from catenary_agent.generation.frames.sent_caches import SentCacheReporter
    from catenary_services.transport.interface import Link

_log = get_logger("catenary_agent.generation")
_MAX_FRAMES = 4_096
"""The most frames in one line. If a further one arrives, its sessions fail as overloaded."""

Failed = Callable[[tuple[int, ...], CatenaryError, str], None]


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


class PeerSender:
    """Delivers frames to agents and gateways.

    Invariants: frames of one line leave in the order of `send`. At most `max_bytes` and
    `_MAX_FRAMES` wait in a line. All sessions of a frame that does not leave are failed, and so are
    those of a frame whose link broke before the frame had certainly arrived.
    """

    def __init__(
        self,
        hub: LinkHub,
        limits: tuple[float, int],
        header_of: Callable[[SessionFrame], bytes],
        failed: Failed,
        uplink: EmulatedLink | None = None,
        sent: SentCacheReporter | None = None,
    ) -> None:
        """Sends over the links of `hub`.

        Args:
            hub: Opens links to peers.
            limits: Seconds a peer may take to accept a frame, and the most bytes in each line to
                it.
            header_of: Encodes a frame's header when the frame leaves.
            failed: Called with the sessions, the error and the peer when a frame cannot be
                delivered.
            uplink: An emulated link; frames to peers pass it one after the other, at its speed.
            sent: Told how long frames of caches took to leave.
        """
        self._hub = hub
        self._timeout_s, self._max_bytes = limits
        self._header_of = header_of
        self._failed = failed
        self._uplink = uplink
        self._sent = sent
        self._lines: dict[str, _Line] = {}
        self._links: dict[str, Link] = {}
        self._lost: dict[str, dict[int, None]] = {}
        """The sessions of frames that a broken link may have lost, by peer, until they are
        reported."""

    def send(self, peer: str, frame: SessionFrame) -> None:
        """Queues a frame for a peer; errors are reported to `failed`."""
        line = self._lines.get(peer)
        if line is None:
            if self._leaves_at_once(peer, frame):
                return
            line = _Line()
            self._lines[peer] = line
            line.task = asyncio.get_running_loop().create_task(self._drain(peer, line))
        part, nbytes = line.bulk if frame.can_wait else line.urgent, frame.nbytes
        if part.frames and (
            part.nbytes + nbytes > self._max_bytes or len(part.frames) >= _MAX_FRAMES
        ):
            error = Overloaded(f"{len(part.frames)} frames wait for {peer} already")
            self._failed(frame.session_ids, error, peer)
            frame.settle()
            return
        part.frames.append(frame)
        part.nbytes += nbytes

    def _leaves_at_once(self, peer: str, frame: SessionFrame) -> bool:
        """Sends a frame for which no other waits; returns False if a task must wait for the link.

        On the way to a process of this machine a token has nothing to wait for, so it needs no
        task. Such a link loses nothing that has left.
        """
        link = self._links.get(peer)
        if link is None or link.closed or not link.capabilities.same_host or frame.nbytes:
            return False
        try:
            slot = link.try_export(0)
            if slot is None:
                return False
            try:
                if not link.try_push(slot, self._header_of(frame)):
                    return False
            finally:
                slot.release()
        except CatenaryError as error:
            self._failed(frame.session_ids, self._told(peer, error), peer)
        except Exception:
            return False  # the task meets it again, and reports it
        frame.settle()
        return True

    async def close(self) -> None:
        """Drops all queued frames."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lines.clear()

    async def _drain(self, peer: str, line: _Line) -> None:
        """Sends the queued frames of a peer until none is left."""
        try:
            while (part := line.next).frames:
                frame = part.frames[0]
                await self._send(peer, frame)
                part.frames.popleft()
                part.nbytes -= frame.nbytes
                frame.settle()
        except CatenaryError as error:
            self._give_up(peer, line, self._told(peer, error))
        except Exception:
            _log.exception("delivery_failed", peer=peer)
            self._give_up(peer, line, InternalError("the frame could not be delivered"))
        finally:
            # Also after a cancellation. Nothing was awaited since the line was found empty.
            if self._lines.get(peer) is line:
                del self._lines[peer]

    def _give_up(self, peer: str, line: _Line, error: CatenaryError) -> None:
        """Fails every session in the line: later frames would arrive with a gap before them."""
        frames = [*line.urgent.frames, *line.bulk.frames]
        ids = dict.fromkeys(each for frame in frames for each in frame.session_ids)
        line.urgent.frames.clear()
        line.bulk.frames.clear()
        if ids:
            self._failed(tuple(ids), error, peer)
        for frame in frames:
            frame.settle()

    def _told(self, peer: str, error: CatenaryError) -> CatenaryError:
        if isinstance(error, DeadlineExceeded):
            return PartitionLost(f"{peer} took no frame for {self._timeout_s:g} s")
        if isinstance(error, Unavailable):
            return PartitionLost(error.message)
        if isinstance(error, InvalidInput):  # the frame was made here, so the mistake is ours
            return InternalError(error.message)
        return error

    async def _send(self, peer: str, frame: SessionFrame) -> None:
        link = self._links.get(peer)
        if link is None or link.closed:
            link = await self._hub.link_to(peer, self._timeout_s)
            self._links = {name: each for name, each in self._links.items() if not each.closed}
            self._links[peer] = link
        began_ns, nbytes = time.monotonic_ns(), frame.nbytes
        slot = await link.export(nbytes, self._timeout_s)
        try:
            if nbytes:
                frame.fill(slot.view)
            if self._uplink is not None and nbytes:
                await self._uplink.turn(nbytes)
            lost = partial(self._lost_on_its_way, peer, frame.session_ids)
            await link.push(slot, self._header_of(frame), self._timeout_s, lost)
        finally:
            slot.release()
        if self._sent is not None and frame.CARRIES_CACHE:
            self._sent.add(peer, nbytes, time.monotonic_ns() - began_ns)

    def _lost_on_its_way(
        self, peer: str, session_ids: tuple[int, ...], error: CatenaryError
    ) -> None:
        """Notes a frame that its link may have lost; frames of one link are reported together."""
        known = self._lost.get(peer)
        if known is None:
            known = self._lost[peer] = {}
            asyncio.get_running_loop().call_soon(self._tell_lost, peer, error)
        known.update(dict.fromkeys(session_ids))

    def _tell_lost(self, peer: str, error: CatenaryError) -> None:
        ids = tuple(self._lost.pop(peer))
        if ids:
            _log.warning("link_broke", peer=peer, sessions=len(ids), error=error.message)
            self._failed(ids, self._told(peer, error), peer)


class _Part:
    """One line of frames, which leave in order."""

    __slots__ = ("frames", "nbytes")

    def __init__(self) -> None:
        self.frames: deque[SessionFrame] = deque()
        self.nbytes = 0


class _Line:
    """The two lines of frames that wait for one peer."""

    __slots__ = ("bulk", "task", "urgent")

    def __init__(self) -> None:
        self.urgent = _Part()
        self.bulk = _Part()
        self.task: asyncio.Task[None] | None = None

    @property
    def next(self) -> _Part:
        """The line to send from next: the urgent one unless it is empty."""
        return self.urgent if self.urgent.frames else self.bulk
