"""Answers that come piece by piece.

A request is sent when its first piece is asked for. Leaving the loop and closing the stream (or
the `with` statement's end) cancels the answer on the server. What a caller has seen is never
generated anew: see `catenary.text.continuing`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Any

from catenary.errors import CatenaryError
from catenary.rpc.connection import Connection
from catenary.rpc.targets import Targets
from catenary.text.continuing import ResumedAnswer, TextCall
from catenary.text.generation import GeneratedText, GenerationResult, ResultBuilder


class AsyncTextStream(AsyncIterator[GeneratedText]):
    """Iterates over the pieces of one answer; any of them may raise a `CatenaryError`."""

    def __init__(
        self,
        call: TextCall,
        targets: Targets,
        send: Callable[[Any, float | None, Connection], AsyncGenerator[Any, None]],
    ) -> None:
        self._gathering = ResultBuilder(call.request_id)
        # Not a method: a stream that is dropped is freed, and so cancelled, at once.
        self._pieces = _pieces(call, targets, send, self._gathering)

    @property
    def id(self) -> str:
        """The request's id."""
        return self._gathering.id

    @property
    def so_far(self) -> GenerationResult:
        """The answer so far; its finish reason is empty until the end."""
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


async def _pieces(
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
