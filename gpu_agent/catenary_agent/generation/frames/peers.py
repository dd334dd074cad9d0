"""Session frames and their delivery: two bounded lines per peer, each in order.

Rows of prompts wait for rows of streams, and parts of caches for both. All other frames keep rings
going and overtake them. So does the last part of the cache of a session that moves: it is small,
and the session stands still until it arrives. What was handed to a slow link cannot be overtaken,
so little of what can wait is handed over at a time (`LinkPace`).
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from catenary_agent.generation.frames.link_pace import LinkPace
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
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


class Priority(enum.IntEnum):
    """The kinds of frames by what they wait for: each for those before it."""

    RINGS = 0
    PROMPTS = 1
    CACHES = 2


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
    def priority(self) -> Priority:
        """The frames that go before it."""
        return Priority.RINGS

    @property
    def turn(self) -> tuple[int, int]:
        """The place among those that can wait, the least first; equal ones keep their order."""
        return (0, 0)

    def narrow(self) -> None:
        """Has hidden states travel in half as many bytes, rounded."""

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

    def header(self, epoch: int, agent_id: str, now: Nanoseconds) -> bytes:
        """Returns the encoded header, with `now` as the time of sending."""
        header = frame_pb2.FrameHeader(kind=self.KIND, epoch=epoch, sent_monotonic_ns=now)
        self.describe(header, agent_id)
        return header.SerializeToString()


class PeerSender:
    """Delivers frames to agents and gateways.

    Invariants: frames of one line with the same turn leave in the order of `send`. At most
    `max_bytes` and `_MAX_FRAMES` wait in a line. All sessions of a frame that does not leave are
    failed, and so are those of a frame whose link broke before the frame had certainly arrived.
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
        """Delivers over the links of a hub.

        Args:
            hub: The links to peers.
            limits: The seconds that a peer may take no byte for, and `max_bytes`.
            header_of: Returns the header of a frame, as it leaves.
            failed: Told the sessions that fail, why, and at which peer.
            uplink: The emulated link of this agent, if it has one.
            sent: Told how long parts of caches took to leave.
        """
        self._hub = hub
        self._timeout_s, self._max_bytes = limits
        self._header_of = header_of
        self._failed = failed
        self._uplink = uplink
        self._sent = sent
        self.narrows = False
        """Whether hidden states are rounded to bfloat16 for peers on other machines."""
        self._lines: dict[str, _Line] = {}
        self._links: dict[str, Link] = {}
        self._paces: dict[str, LinkPace] = {}
        self._lost: dict[str, dict[int, None]] = {}
        """The sessions of frames that a broken link may have lost, by peer, until they are
        reported."""
        self.link_bytes: dict[str, int] = {}
        """The most bytes of a frame that others may overtake, by peer; 0: any number. The
        generation thread reads it."""

    def send(self, peer: str, frame: SessionFrame) -> None:
        """Queues a frame for a peer; errors are reported to `failed`."""
        line = self._lines.get(peer)
        if line is None:
            if self._leaves_at_once(peer, frame):
                return
            line = _Line()
            self._lines[peer] = line
            line.task = asyncio.get_running_loop().create_task(self._drain(peer, line))
        part: _Rings | _Others = line.others
        if frame.priority is Priority.RINGS:
            part = line.rings
        nbytes = frame.nbytes
        if part.frames and (
            part.nbytes + nbytes > self._max_bytes or len(part.frames) >= _MAX_FRAMES
        ):
            error = Overloaded(f"{len(part.frames)} frames wait for {peer} already")
            self._failed(frame.session_ids, error, peer)
            frame.settle()
            return
        part.add(frame, nbytes)
        if line.woken is not None:
            line.wake()

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
            while line.rings.frames or line.others.frames:
                if not line.rings.frames and (wait_ns := await self._wait_ns(peer)):
                    await line.pause(wait_ns / NANOSECONDS_PER_SECOND)
                    continue
                rings, others = line.rings, line.others
                frame = line.leaving = rings.take() if rings.frames else others.take()
                await self._send(peer, frame)
                line.leaving = None
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
            if (pace := self._paces.get(peer)) is not None:
                pace.rest()

    async def _wait_ns(self, peer: str) -> Nanoseconds:
        """Returns for how long a frame that may wait should not be sent to a peer yet.

        Raises:
            DeadlineExceeded: The peer took no byte for too long; the link is closed.
        """
        pace, link = self._paces.get(peer), self._links.get(peer)
        if pace is None or link is None or (transit := link.transit()) is None:
            return 0
        now_ns = time.monotonic_ns()
        wait_ns = pace.wait_ns(now_ns, transit)
        self._note_pace(peer, pace)
        if wait_ns and pace.is_stalled(now_ns, round(self._timeout_s * NANOSECONDS_PER_SECOND)):
            await link.close()
            raise DeadlineExceeded("the peer takes no frames")
        return wait_ns

    def _note_pace(self, peer: str, pace: LinkPace | None) -> None:
        """Tells the generation thread how large frames for a peer may be."""
        self.link_bytes[peer] = 0 if pace is None else pace.frame_bytes

    def _give_up(self, peer: str, line: _Line, error: CatenaryError) -> None:
        """Fails every session in the line: later frames would arrive with a gap before them."""
        frames = [] if line.leaving is None else [line.leaving]
        frames += [*line.rings.clear(), *line.others.clear()]
        line.leaving = None
        ids = dict.fromkeys(each for frame in frames for each in frame.session_ids)
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
            self._paces = {name: each for name, each in self._paces.items() if name in self._links}
            self._paces.pop(peer, None)
            if link.transit() is not None:
                self._paces[peer] = LinkPace()
            self._note_pace(peer, self._paces.get(peer))
        if self.narrows and not link.capabilities.same_host:
            frame.narrow()
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


class _Line:
    """The frames that wait for one peer."""

    __slots__ = ("leaving", "others", "rings", "task", "woken")

    def __init__(self) -> None:
        self.rings = _Rings()
        self.others = _Others()
        self.task: asyncio.Task[None] | None = None
        self.leaving: SessionFrame | None = None
        """The frame that is being sent."""
        self.woken: asyncio.Future[None] | None = None
        """Set while `pause` waits."""

    async def pause(self, seconds: float) -> None:
        """Waits, but no longer than until a frame is added."""
        loop = asyncio.get_running_loop()
        self.woken = loop.create_future()
        timer = loop.call_later(seconds, self.wake)
        try:
            await self.woken
        finally:
            timer.cancel()
            self.woken = None

    def wake(self) -> None:
        """Ends the pause, if there is one."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class _Rings:
    """Frames that keep rings going, which leave in order."""

    __slots__ = ("frames", "nbytes")

    def __init__(self) -> None:
        self.frames: deque[tuple[int, SessionFrame]] = deque()
        """The frames that wait, each with its size."""
        self.nbytes = 0

    def add(self, frame: SessionFrame, nbytes: int) -> None:
        self.frames.append((nbytes, frame))
        self.nbytes += nbytes

    def take(self) -> SessionFrame:
        """Removes and returns the next frame."""
        nbytes, frame = self.frames.popleft()
        self.nbytes -= nbytes
        return frame

    def clear(self) -> list[SessionFrame]:
        """Removes and returns all frames."""
        frames = [frame for _, frame in self.frames]
        self.frames.clear()
        self.nbytes = 0
        return frames


class _Others:
    """Frames that can wait, which leave by their priority and their turns."""

    __slots__ = ("_count", "frames", "nbytes")

    def __init__(self) -> None:
        self.frames: list[tuple[Priority, tuple[int, int], int, int, SessionFrame]] = []
        """A heap of priority, turn, number, size and frame."""
        self.nbytes = 0
        self._count = 0

    def add(self, frame: SessionFrame, nbytes: int) -> None:
        self._count += 1
        heapq.heappush(self.frames, (frame.priority, frame.turn, self._count, nbytes, frame))
        self.nbytes += nbytes

    def take(self) -> SessionFrame:
        """Removes and returns the next frame."""
        *_, nbytes, frame = heapq.heappop(self.frames)
        self.nbytes -= nbytes
        return frame

    def clear(self) -> list[SessionFrame]:
        """Removes and returns all frames."""
        frames = [each[-1] for each in sorted(self.frames)]
        self.frames.clear()
        self.nbytes = 0
        return frames
