"""Bytes of files as peers send them: in pieces, no more at a time than a peer's window allows."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from catenary_services.content.record import LARGEST_RECORD_BYTES
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.errors import CatenaryError
from catenary_services.store.messages import (
    ABSENT,
    BUSY,
    GIVEN,
    FilePart,
    LinkSource,
    push_request,
)
from catenary_services.store.settings import PIECE_BYTES, StoreSettings
from catenary_services.store.window import ByteRate, FetchWindow

if TYPE_CHECKING:
    from catenary_protos.catenary.v1.frame_pb2 import ContentAnswer, FrameHeader
    from catenary_services.transport.interface import ReceivedFrame

T = TypeVar("T")
_LONGEST_POSTPONEMENT_NS = 5_000_000_000
_POSTPONEMENTS = 50


class MissingError(Exception):
    """A peer that does not have the bytes."""


class TransferError(Exception):
    """A peer that does not answer as it should; the text says how."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that waits for its answer."""

    peer: str
    into: memoryview
    answered: asyncio.Future[ContentAnswer]


class _Gate:
    """The requests that one peer has to answer: no more at a time than its window allows."""

    def __init__(self) -> None:
        self.window = FetchWindow()
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        while self._busy >= self.window.pieces:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
        self._busy += 1

    def leave(self) -> None:
        self._busy -= 1
        self._wake()

    def _wake(self) -> None:
        free = self.window.pieces - self._busy
        while self._waiting and free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


class FileTransfers:
    """Asks peers for parts of files, and takes their answers, on one event loop."""

    def __init__(self, hub: LinkSource, settings: StoreSettings) -> None:
        self.last_ns: Nanoseconds = 0
        """The moment at which the last piece came, by the monotonic clock."""
        self._hub = hub
        self._answer_s = settings.answer_s
        self._rate = ByteRate(settings.fetch_bytes_per_second)
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._gates: dict[str, _Gate] = {}

    async def fill(
        self,
        peer: str,
        part: FilePart,
        into: memoryview,
        came: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        """Fetches a part of a file, piece by piece.

        Args:
            peer: The peer that is asked.
            part: What is asked for.
            into: Where its bytes are put.
            came: Called with the size of each piece that has come.

        Raises:
            MissingError: The peer does not have it.
            TransferError: The peer does not answer as it should.
        """

        async def one(at: int) -> None:
            size = min(PIECE_BYTES, part.length - at)
            piece = replace(part, offset=part.offset + at, length=size)
            await self._piece(peer, piece, into[at : at + size])
            came(size)

        tasks = [asyncio.ensure_future(one(at)) for at in range(0, part.length, PIECE_BYTES)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def whole(self, peer: str, part: FilePart) -> bytes:
        """Returns a file whose size only the peer knows; `part` is its first piece.

        Raises:
            MissingError: The peer does not have it.
            TransferError: The peer does not answer as it should, or the file is too large.
        """
        start = bytearray(part.length)
        answer = await self._piece(peer, part, memoryview(start))
        if answer.size > LARGEST_RECORD_BYTES:
            raise TransferError(f"its {part.path} has {answer.size} bytes")
        content = bytearray(answer.size)
        content[: part.length] = start[: answer.size]
        rest = replace(part, offset=part.length, length=max(0, answer.size - part.length))
        await self.fill(peer, rest, memoryview(content)[part.length :])
        return bytes(content)

    def lost(self, peer: str) -> None:
        """Asks a peer for less at a time, after a request that it has not answered."""
        self._gate(peer).window.lost()

    def on_answer(self, header: FrameHeader, frame: ReceivedFrame) -> None:
        """Handles the answer of a peer."""
        answer = header.content_answer
        asked = self._asked.get(answer.request_id)
        # An answer that comes late, or from somebody who was not asked, is of no use to anybody.
        if asked is not None and asked.peer == frame.sender.name and not asked.answered.done():
            payload, into = frame.payload, asked.into
            if len(payload) > len(into):
                asked.answered.set_exception(TransferError("it sent more than was asked for"))
            else:
                into[: len(payload)] = payload
                if answer.verdict == GIVEN and len(payload) < min(len(into), answer.size):
                    asked.answered.set_exception(TransferError("it sent less than it said"))
                else:
                    asked.answered.set_result(answer)
        frame.release()

    async def _piece(self, peer: str, part: FilePart, into: memoryview) -> ContentAnswer:
        """Returns the answer of a peer that has given a piece, which is in `into` then.

        Raises:
            MissingError: The peer does not have it.
            TransferError: The peer does not answer, or is busy for long.
        """
        gate = self._gate(peer)
        await gate.enter()
        try:
            for _ in range(_POSTPONEMENTS):
                turn_ns = self._rate.wait_ns(part.length, time.monotonic_ns())
                await asyncio.sleep(turn_ns / NANOSECONDS_PER_SECOND)
                began = time.monotonic_ns()
                answer = await self._ask(peer, part, into)
                now = time.monotonic_ns()
                if answer.verdict == GIVEN:
                    gate.window.answered(now - began, now)
                    self.last_ns = now
                    return answer
                if answer.verdict == ABSENT:
                    raise MissingError
                if answer.verdict != BUSY:
                    raise TransferError(f"its verdict {answer.verdict} is unknown here")
                delay_ns = min(_LONGEST_POSTPONEMENT_NS, max(1_000_000, answer.retry_after_ns))
                await asyncio.sleep(delay_ns / NANOSECONDS_PER_SECOND)
            raise TransferError("it is busy all the time")
        finally:
            gate.leave()

    async def _ask(self, peer: str, part: FilePart, into: memoryview) -> ContentAnswer:
        number = next(self._numbers)
        answered: asyncio.Future[ContentAnswer] = quiet_future()
        self._asked[number] = _Asked(peer, into, answered)
        try:
            async with asyncio.timeout(self._answer_s):
                link = await self._hub.link_to(peer, self._answer_s)
                await push_request(link, number, part, self._answer_s)
                return await answered
        except TimeoutError:
            raise TransferError(f"it did not answer within {self._answer_s:g} s") from None
        except CatenaryError as error:
            raise TransferError(error.message) from None
        finally:
            del self._asked[number]

    def _gate(self, peer: str) -> _Gate:
        gate = self._gates.get(peer)
        if gate is None:
            gate = self._gates[peer] = _Gate()
        return gate


def quiet_future() -> asyncio.Future[T]:
    """Returns a future that may end with an exception at which nobody looks."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
