"""Answers that come piece by piece.

A request is sent when its first piece is asked for. Leaving the loop and closing the stream (or
the `with` statement's end) cancels the answer on the server. A retry policy applies only until the
first piece is there: what a caller has seen is never generated anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any

from catenary.attempts import Attempts
from catenary.calls import Call
from catenary.connection import Connection
from catenary.errors import CatenaryError, ProtocolError
from catenary.generation import Gathering, GeneratedText, GenerationResult

TextCall = Call[GeneratedText]


class TextStream(Iterator[GeneratedText]):
    """Iterates over the pieces of one answer; any of them may raise a `CatenaryError`."""

    def __init__(
        self,
        call: TextCall,
        connection: Connection,
        send: Callable[[Any, float | None], Iterator[Any]],
    ) -> None:
        self._gathering = Gathering(call.request_id)
        # Not a method: a stream that is dropped is freed, and so cancelled, at once.
        self._pieces = _pieces(call, connection, send, self._gathering)

    @property
    def id(self) -> str:
        """The request's id."""
        return self._gathering.id

    @property
    def so_far(self) -> GenerationResult:
        """What has come already; the finish reason is empty until the end."""
        return self._gathering.result

    def result(self) -> GenerationResult:
        """Waits for the rest and returns the whole answer."""
        for _ in self:
            pass
        return self.so_far

    def close(self) -> None:
        """Cancels what has not come yet; does nothing after the last piece."""
        self._pieces.close()

    def __next__(self) -> GeneratedText:
        return next(self._pieces)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncTextStream(AsyncIterator[GeneratedText]):
    """Iterates over the pieces of one answer; any of them may raise a `CatenaryError`."""

    def __init__(
        self,
        call: TextCall,
        connection: Connection,
        send: Callable[[Any, float | None], AsyncGenerator[Any, None]],
    ) -> None:
        self._gathering = Gathering(call.request_id)
        self._pieces = _pieces_async(call, connection, send, self._gathering)

    @property
    def id(self) -> str:
        """The request's id."""
        return self._gathering.id

    @property
    def so_far(self) -> GenerationResult:
        """What has come already; the finish reason is empty until the end."""
        return self._gathering.result

    async def result(self) -> GenerationResult:
        """Waits for the rest and returns the whole answer; cancels it if cancelled itself."""
        async with contextlib.aclosing(self):
            async for _ in self:
                pass
        return self.so_far

    async def aclose(self) -> None:
        """Cancels what has not come yet; does nothing after the last piece."""
        await self._pieces.aclose()

    async def __anext__(self) -> GeneratedText:
        return await anext(self._pieces)

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _pieces(
    call: TextCall,
    connection: Connection,
    send: Callable[[Any, float | None], Iterator[Any]],
    gathering: Gathering,
) -> Generator[GeneratedText, None, None]:
    attempts = Attempts(call, connection)
    while True:
        try:
            for reply in send(call.request, _deadline_s(call, attempts)):
                piece = call.read(reply)
                gathering.add(piece)
                yield piece
            _check_end(gathering)
            return
        except CatenaryError as error:
            wait_s = _wait_s(attempts, error, gathering)
            if wait_s is None:
                raise
        time.sleep(wait_s)
        attempts.again()


async def _pieces_async(
    call: TextCall,
    connection: Connection,
    send: Callable[[Any, float | None], AsyncGenerator[Any, None]],
    gathering: Gathering,
) -> AsyncGenerator[GeneratedText, None]:
    attempts = Attempts(call, connection)
    while True:
        try:
            async with contextlib.aclosing(send(call.request, _deadline_s(call, attempts))) as sent:
                async for reply in sent:
                    piece = call.read(reply)
                    gathering.add(piece)
                    yield piece
            _check_end(gathering)
            return
        except CatenaryError as error:
            wait_s = _wait_s(attempts, error, gathering)
            if wait_s is None:
                raise
        await asyncio.sleep(wait_s)
        attempts.again()


def _deadline_s(call: TextCall, attempts: Attempts) -> float | None:
    """The gRPC deadline: what is left of the caller's own limit; None if there is none."""
    return None if call.timeout_s is None else attempts.remaining_s


def _wait_s(attempts: Attempts, error: CatenaryError, gathering: Gathering) -> float | None:
    """Returns the wait before another attempt, None to give up; marks the error."""
    wait_s = attempts.wait_s(error)
    return None if gathering.pieces else wait_s


def _check_end(gathering: Gathering) -> None:
    if not gathering.pieces or not gathering.pieces[-1].finish_reason:
        raise ProtocolError("the server ended the answer without a finish reason")
