"""Connections without sockets: protocols of asyncio that are fed by hand, and nobody else's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from parser_fuzzing.target import BrokenPromise
from shared_helpers.scripted_transport import ScriptedTransport

TURNS = 12
"""Turns of the event loop between two pieces; what has to wait longer waits for a clock."""


def pieces(data: bytes) -> Iterator[bytes]:
    """Yields the bytes in pieces whose lengths the first byte decides."""
    size = (1, 7, 64, 1 << 20)[data[0] & 3] if data else 1
    for at in range(1, len(data), size):
        yield data[at : at + size]


def fed(transport: ScriptedTransport, data: bytes, take: Callable[[bytes], None]) -> None:
    """Gives the bytes to a protocol of either kind, some turns of the loop between the pieces.

    Raises:
        BrokenPromise: The protocol had something done that failed.
    """
    loop = _loop()
    failed: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failed.append(context))

    async def scene() -> None:
        for piece in pieces(data):
            if transport.is_closed:
                break
            take(piece)
            await turns()

    loop.run_until_complete(scene())
    raise_failed(failed)


async def turns() -> None:
    """Lets everything that waits for no clock happen."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def raise_failed(failed: list[dict[str, Any]]) -> None:
    """Raises the first of the errors that an event loop was left with."""
    for context in failed:
        error = context.get("exception")
        if isinstance(error, BaseException):
            raise error
        raise BrokenPromise(str(context.get("message")))


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


def settle() -> None:
    """Lets what was cancelled, or has just been told of an end, come to it.

    Raises:
        BrokenPromise: Something of it failed.
    """
    fed(ScriptedTransport(), b"\0\0", lambda _: None)


def in_loop(make: Callable[[], Any]) -> Any:
    """Returns what a function returns that has to run on the event loop."""

    async def made() -> Any:
        return make()

    return _loop().run_until_complete(made())
