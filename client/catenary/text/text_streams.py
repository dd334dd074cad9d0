"""Streams of answers that arrive piece by piece.

A request is sent when its first piece is asked for. Leaving the loop and closing the stream (or the
`with` statement's end) cancels the answer on the server. Pieces that a caller has received are
never generated anew: see `catenary.text.continuing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any

from catenary.errors import CatenaryError
from catenary.rpc.connection import Connection
from catenary.rpc.targets import Targets
from catenary.text.continuing import ResumedAnswer, TextCall
from catenary.text.generation import GeneratedText, GenerationResult, ResultBuilder


class TextStream(Iterator[GeneratedText]):
    """An iterator over the pieces of one answer; any of them may raise a `CatenaryError`."""

    def __init__(
        self,
        call: TextCall,
        targets: Targets,
        send: Callable[[Any, float | None, Connection], Iterator[Any]],
    ) -> None:
        self._gathering = ResultBuilder(call.request_id)
        # Not a method, so that a dropped stream is freed, and thus cancelled, at once.
        self._pieces = _pieces(call, targets, send, self._gathering)

    @property
    def id(self) -> str:
        """Id of the request."""
        return self._gathering.id

    @property
    def so_far(self) -> GenerationResult:
        """The answer as far as it has arrived; the finish reason is empty until the end."""
        return self._gathering.result

    def result(self) -> GenerationResult:
        """Waits for the rest and returns the whole answer."""
        for _ in self:
            pass
        return self.so_far

    def close(self) -> None:
        """Cancels the rest of the answer; does nothing after the last piece."""
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
    """An asyncio iterator over the pieces of an answer; any may raise a `CatenaryError`."""

    def __init__(
        self,
        call: TextCall,
        targets: Targets,
        send: Callable[[Any, float | None, Connection], AsyncGenerator[Any, None]],
    ) -> None:
        self._gathering = ResultBuilder(call.request_id)
        self._pieces = _pieces_async(call, targets, send, self._gathering)

    @property
    def id(self) -> str:
        """Id of the request."""
        return self._gathering.id

    @property
    def so_far(self) -> GenerationResult:
        """The answer as far as it has arrived; the finish reason is empty until the end."""
        return self._gathering.result

    async def result(self) -> GenerationResult:
        """Waits for the rest and returns the whole answer; cancels it if cancelled itself."""
        async with contextlib.aclosing(self):
            async for _ in self:
                pass
        return self.so_far

    async def aclose(self) -> None:
        """Cancels the rest of the answer; does nothing after the last piece."""
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
    targets: Targets,
    send: Callable[[Any, float | None, Connection], Iterator[Any]],
    gathering: ResultBuilder,
) -> Generator[GeneratedText, None, None]:
    course = ResumedAnswer(call, targets, gathering)
    while True:
        try:
            for reply in send(call.request, course.deadline_s, course.connection):
                yield course.take(reply)
            course.check_end()
            return
        except CatenaryError as error:
            wait_s = course.wait_s(error)
        time.sleep(wait_s)
        course.again()


async def _pieces_async(
    call: TextCall,
    targets: Targets,
    send: Callable[[Any, float | None, Connection], AsyncGenerator[Any, None]],
    gathering: ResultBuilder,
) -> AsyncGenerator[GeneratedText, None]:
    course = ResumedAnswer(call, targets, gathering)
    while True:
        try:
            replies = send(call.request, course.deadline_s, course.connection)
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield course.take(reply)
            course.check_end()
            return
        except CatenaryError as error:
            wait_s = course.wait_s(error)
        await asyncio.sleep(wait_s)
        course.again()
