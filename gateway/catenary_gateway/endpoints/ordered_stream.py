"""Concurrent answers to the requests of a stream, written in the order of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


async def answer_in_order(
    requests: AsyncIterator[Request],
    answer: Callable[[Request], Awaitable[Response]],
    write: Callable[[Response], Awaitable[object]],
    most: int,
) -> None:
    """Answers every request of a stream, and returns when all answers are written.

    At most `most` requests are worked on or wait to be written. Then no more are read, and flow
    control holds the client back. `answer` must not raise.
    """
    async with asyncio.TaskGroup() as tasks:
        under_way: asyncio.Queue[asyncio.Task[Response] | None] = asyncio.Queue()
        places = asyncio.Semaphore(most)

        async def begin() -> None:
            async for request in requests:
                await places.acquire()
                under_way.put_nowait(tasks.create_task(_call(answer, request)))
            under_way.put_nowait(None)

        tasks.create_task(begin())
        while (task := await under_way.get()) is not None:
            await write(await task)
            places.release()


async def _call(answer: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    return await answer(request)
