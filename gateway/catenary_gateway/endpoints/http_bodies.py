"""Reading of HTTP request bodies, which are inflated and parsed off the event loop.

A body takes its share of the gateway's memory limit as its bytes arrive, so that a client that
announces much and sends nothing holds nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_gateway.admission.request_pipeline import caller
from catenary_services.errors import DeadlineExceeded, InvalidInput, Overloaded, PayloadTooLarge

LONGEST_S = 60.0
"""Longest time in seconds for a body to arrive."""
SILENCE_S = 10.0
"""Longest time in seconds without any byte of a body."""
OFF_LOOP_BYTES = 64 * 1024
"""Bodies above this size are inflated and parsed in a thread."""
MOST_RATIO = 100
"""Most bytes that one byte of a compressed body may inflate to. Text reaches less than ten; more is
made on purpose."""
_RATIO_FROM_BYTES = 1 << 20
"""Inflated size up to which any ratio is accepted, because a small tensor of zeros has a large
one."""
_STEP_BYTES = 256 * 1024
_LARGE_BYTES = 2 * 1024 * 1024
"""Bodies above this size are inflated and parsed one at a time, because each may need as much
again."""
_WORKERS = 2
_MOST_WAITING = 64
_RETRY_NS = 100_000_000
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""zlib's `wbits` by encoding; 47 accepts both forms of "deflate" that begin with a header."""

T = TypeVar("T")


class BoundedThreadPool:
    """A thread pool for work that would block the event loop; few callers may wait for it."""

    def __init__(self, workers: int = _WORKERS, most_waiting: int = _MOST_WAITING) -> None:
        self._pool = ThreadPoolExecutor(workers, "http-body")
        self._most = most_waiting
        self._pending = 0
        self._large = asyncio.Semaphore(1)

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which handles `nbytes` bytes; small work runs at once.

        Raises:
            Overloaded: Too many callers are waiting already.
        """
        if nbytes <= OFF_LOOP_BYTES:
            return work()
        if self._pending >= self._most:
            raise Overloaded("too many large bodies are being read", retry_after_ns=_RETRY_NS)
        self._pending += 1
        try:
            if nbytes <= _LARGE_BYTES:
                return await self._in_thread(work)
            async with self._large:
                return await self._in_thread(work)
        finally:
            self._pending -= 1

    async def _in_thread(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The caller is gone, but the thread is still busy and must be counted until it is done.
            if not future.cancel():
                await asyncio.gather(future, return_exceptions=True)
            raise
        finally:
            del future  # its exception refers to this frame: this breaks the cycle

    def close(self) -> None:
        """Ends the threads once their present work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


OFF_LOOP: web.AppKey[BoundedThreadPool] = web.AppKey("off_loop", BoundedThreadPool)


def require_announced(request: web.Request, most_bytes: int) -> None:
    """Checks by a request's headers that its body may be read.

    Raises:
        PayloadTooLarge: The announced size is more than `most_bytes`.
        InvalidInput: The encoding is not supported.
    """
    if (request.content_length or 0) > most_bytes:
        raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
    encoding = _encoding_of(request)
    if encoding and encoding not in _WINDOWS:
        raise InvalidInput("Content-Encoding", f"{encoding[:40]!r} is not understood here")


async def body_of(
    request: web.Request, most_bytes: int, permit: ConcurrencyPermit | None = None
) -> bytes:
    """Returns the inflated body of a request.

    Args:
        request: The request.
        most_bytes: A larger body is refused as soon as more has arrived.
        permit: The permit that counts its bytes; None for bodies that are always small.

    Raises:
        PayloadTooLarge: The body has more than `most_bytes`.
        Overloaded: The gateway has no room for the body.
        DeadlineExceeded: The body arrived too slowly.
        InvalidInput: The body is not compressed as announced.
    """
    require_announced(request, most_bytes)
    body = await _received(request, most_bytes, permit)
    encoding = _encoding_of(request)
    if encoding:
        window = _WINDOWS[encoding]
        likely = min(most_bytes, len(body) * MOST_RATIO)
        if permit is not None:
            permit.hold(len(body) + likely)
        caller().read_bytes = likely
        off_loop = request.app[OFF_LOOP]
        body = await off_loop.run(likely, lambda: inflated(body, window, most_bytes))
        if permit is not None:
            permit.hold(len(body))
    caller().read_bytes = len(body)  # what the sender is charged for if it is refused
    return body


def inflated(body: bytes, window: int, most_bytes: int) -> bytes:
    """Returns `body` decompressed in steps, between which other threads can run.

    Raises:
        PayloadTooLarge: The result is larger than `most_bytes`, or suspiciously larger than `body`.
        InvalidInput: The body does not decompress, or other bytes follow it.
    """
    most = min(most_bytes, max(_RATIO_FROM_BYTES, len(body) * MOST_RATIO))
    pieces: list[bytes] = []
    total, rest = 0, body
    inflater = zlib.decompressobj(window)
    try:
        while rest and not inflater.eof:
            piece = inflater.decompress(rest, _STEP_BYTES)
            rest = inflater.unconsumed_tail
            total += len(piece)
            if total > most:
                raise PayloadTooLarge(f"the body inflates to more than {most} bytes")
            pieces.append(piece)
    except zlib.error:
        raise _not_as_announced() from None
    if not inflater.eof or inflater.unused_data:
        raise _not_as_announced()
    return b"".join(pieces)


async def _received(
    request: web.Request, most_bytes: int, permit: ConcurrencyPermit | None
) -> bytes:
    if request.content.is_eof() and request.content.exception() is None:
        # A small body comes with its headers: nothing is waited for.
        body = request.content.read_nowait()
        if len(body) > most_bytes:
            raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
        if permit is not None:
            permit.hold(len(body))
        return body
    pieces: list[bytes] = []

    async def more() -> int:
        piece = await request.content.readany()
        if piece:
            pieces.append(piece)
        return len(piece)

    try:
        await arrived(more, most_bytes, permit)
    except (web.RequestPayloadError, HttpProcessingError):
        raise InvalidInput("body", "is not framed as its headers say") from None
    return b"".join(pieces)


async def arrived(
    more: Callable[[], Awaitable[int]], most_bytes: int, permit: ConcurrencyPermit | None
) -> None:
    """Waits until all of a body has arrived.

    Args:
        more: Waits for bytes of the body, and returns their number, 0 at its end.
        most_bytes: A larger body is refused as soon as more has arrived.
        permit: The permit that counts its bytes; None for bodies that are always small.

    Raises:
        PayloadTooLarge: The body has more than `most_bytes`.
        Overloaded: The gateway has no room for the body.
        DeadlineExceeded: The body arrived too slowly.
    """
    total = 0
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LONGEST_S
    try:
        async with asyncio.timeout(SILENCE_S) as silence:
            while count := await more():
                total += count
                if total > most_bytes:
                    raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
                if permit is not None:
                    permit.hold(total)
                silence.reschedule(min(loop.time() + SILENCE_S, end_s))
    except TimeoutError:
        raise DeadlineExceeded(
            "the body did not arrive in time", details={"stage": "arrival"}
        ) from None


def _encoding_of(request: web.Request) -> str:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def _not_as_announced() -> InvalidInput:
    return InvalidInput("body", "does not decompress as its Content-Encoding says")
