"""Measurement of the link to another agent, by frames that it answers.

The frames take the transport that tensors take to that agent. A measurement waits until neither of
the two is at work, unless the scheduler insists, and sends one frame at a time, so that frames of
requests wait for one of them at most.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.engine.reporting import FixedMessage, OutgoingMessage
from catenary_agent.links.echo_sizes import EchoSizes
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.engine.outbound import LinkHub
    from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
    from catenary_services.transport.interface import Link, ReceivedFrame

REQUEST = frame_pb2.FRAME_KIND_ECHO_REQUEST
ANSWER = frame_pb2.FRAME_KIND_ECHO_ANSWER
Measured = scheduler_pb2.LinkMeasured
Order = scheduler_pb2.MeasureLinkTo

_ROUND_TRIPS = 8
_PATTERN_BYTES = 1 << 20
_MOST_ASKING = 64
_ANSWER_S = 5.0
_log = get_logger("catenary_agent.links")


class _BusyError(Exception):
    """One of the two agents is at work."""


class LinkEchoes:
    """Asks for echoes and gives them; runs on one event loop.

    Attributes:
        frame_kinds: The kinds of frames that `on_frame` handles.
    """

    frame_kinds = (REQUEST, ANSWER)

    def __init__(
        self,
        hub: LinkHub,
        tell: Callable[[OutgoingMessage], None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Creates the part without starting anything.

        Args:
            hub: The links to peers.
            tell: Sends a message to the scheduler.
            is_busy: Says whether this agent has work, which a measurement would delay.
        """
        self._hub = hub
        self._tell = tell
        self._is_busy = is_busy
        self._task: asyncio.Task[None] | None = None
        self._asked: dict[str, int] = {}
        """The number of the echo that a peer asked for last, until its turn has come."""
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._number = 0
        self._awaited: tuple[str, int, asyncio.Future[tuple[Nanoseconds, bool]]] | None = None
        """The peer and the number of the echo that is waited for, and who waits: for the moment at
        which it came, and for whether the peer is at work."""

    def measure(self, order: Order) -> None:
        """Measures a link and tells the scheduler; gives up what an earlier order asked for."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._answer_order(order))

    def on_frame(self, header: FrameHeader, frame: ReceivedFrame) -> None:
        """Handles an echo, or what asks for one."""
        now_ns, peer = time.monotonic_ns(), frame.sender.name
        frame.release()
        if header.kind == REQUEST:
            self._give(peer, header.echo_request.number)
            return
        awaited, answer = self._awaited, header.echo_answer
        if awaited is not None and awaited[:2] == (peer, answer.number):
            self._awaited = None
            if not awaited[2].done():
                awaited[2].set_result((now_ns, answer.is_busy))

    async def close(self) -> None:
        """Ends everything. Idempotent."""
        tasks = [*self._answering.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- echoes of peers -------------------------------------------------------------------------

    def _give(self, peer: str, number: int) -> None:
        """Answers a peer's last request: it waits for one echo at a time."""
        if not peer or (peer not in self._asked and len(self._asked) >= _MOST_ASKING):
            return
        self._asked[peer] = number
        if peer not in self._answering:
            self._answering[peer] = asyncio.get_running_loop().create_task(self._answer(peer))

    async def _answer(self, peer: str) -> None:
        try:
            while (number := self._asked.pop(peer, None)) is not None:
                answer = frame_pb2.EchoAnswer(number=number, is_busy=self._is_busy())
                header = frame_pb2.FrameHeader(kind=ANSWER, echo_answer=answer)
                link = await self._hub.link_to(peer, _ANSWER_S)
                slot = await link.export(0, _ANSWER_S)
                await link.push(slot, header.SerializeToString(), _ANSWER_S)
        except CatenaryError as error:
            _log.info("echo_not_sent", peer=peer, why=error.message)
        finally:
            del self._answering[peer]

    # -- measurements ----------------------------------------------------------------------------

    async def _answer_order(self, order: Order) -> None:
        timeout_s = order.deadline_ns / NANOSECONDS_PER_SECOND
        try:
            async with asyncio.timeout(timeout_s):
                said = await self._measured(order, timeout_s)
        except _BusyError:
            said = Measured(outcome=Measured.OUTCOME_BUSY)
        except CatenaryError as error:
            said = Measured(outcome=Measured.OUTCOME_FAILED, why=error.message)
        except TimeoutError:
            said = Measured(outcome=Measured.OUTCOME_FAILED, why="no echo came in time")
        finally:
            self._awaited = None
        said.number = order.number
        self._tell(FixedMessage(scheduler_pb2.AgentMessage(link_measured=said), droppable=True))

    async def _measured(self, order: Order, timeout_s: float) -> Measured:
        """Returns what a measurement finds.

        Raises:
            CatenaryError: The peer cannot be reached.
            _BusyError: One of the two is at work.
        """
        link = await self._hub.link_to(order.peer_id, timeout_s)
        if link.capabilities.same_host:
            return Measured(outcome=Measured.OUTCOME_SAME_HOST)
        # The peer opens its own link for the first echo.
        await self._echo(link, order, b"", 0, timeout_s)
        trips = [await self._echo(link, order, b"", 0, timeout_s) for _ in range(_ROUND_TRIPS)]
        round_trip_ns = max(1, min(trips))
        # What can be compressed on the way would seem to be faster than tensors.
        pattern = os.urandom(min(_PATTERN_BYTES, order.most_bytes))
        sizes = EchoSizes(order.most_bytes, round_trip_ns)
        while (nbytes := sizes.next_bytes()) > 0:
            sizes.took(nbytes, await self._echo(link, order, pattern, nbytes, timeout_s))
        return Measured(
            outcome=Measured.OUTCOME_MEASURED,
            round_trip_ns=round_trip_ns,
            bytes_per_second=sizes.bytes_per_second,
        )

    async def _echo(
        self, link: Link, order: Order, pattern: bytes, nbytes: int, timeout_s: float
    ) -> Nanoseconds:
        """Returns the nanoseconds from pushing a frame of `nbytes` bytes until its echo came."""
        if self._is_busy() and not order.even_if_busy:
            raise _BusyError
        slot = await link.export(nbytes, timeout_s)
        try:
            for start in range(0, nbytes, len(pattern) or 1):
                part = slot.view[start : start + len(pattern)]
                part[:] = pattern[: len(part)]
            self._number += 1
            coming = asyncio.get_running_loop().create_future()
            self._awaited = order.peer_id, self._number, coming
            request = frame_pb2.EchoRequest(number=self._number)
            header = frame_pb2.FrameHeader(kind=REQUEST, echo_request=request).SerializeToString()
            began_ns = time.monotonic_ns()
            await link.push(slot, header, timeout_s)
        finally:
            slot.release()
        came_ns, peer_is_busy = await coming
        if peer_is_busy and not order.even_if_busy:
            raise _BusyError
        return int(came_ns) - began_ns
