"""The bodies of HTTP requests: read as they come, inflated and parsed off the event loop.

What a body holds is taken from the gateway's room as its bytes arrive, so that who announces much
and sends nothing holds nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from catenary_gateway.admission.callers import caller
from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_services.errors import DeadlineExceeded, InvalidInput, Overloaded, PayloadTooLarge

LONGEST_S = 60.0
"""A body may take so long in all."""
SILENCE_S = 10.0
"""No byte of a body for so long is the end of it."""
OFF_LOOP_BYTES = 64 * 1024
"""What is larger is inflated and parsed by a thread."""
MOST_RATIO = 100
"""A body that inflates to more times its size was made to; text inflates to less than ten."""
_RATIO_FROM_BYTES = 1 << 20
"""Small ones may: all zeros are a tensor, too."""
_STEP_BYTES = 256 * 1024
_LARGE_BYTES = 2 * 1024 * 1024
"""Larger ones are inflated and parsed one after the other: each may make as much again."""
_WORKERS = 2
_MOST_WAITING = 64
_RETRY_NS = 100_000_000
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""zlib's `wbits` of each encoding; 47 takes both forms of "deflate" that begin with a header."""

T = TypeVar("T")


class BoundedThreadPool:
    """Threads for what would hold up the event loop; bounded, as is who waits for them."""

    def __init__(self, workers: int = _WORKERS, most_waiting: int = _MOST_WAITING) -> None:
        self._pool = ThreadPoolExecutor(workers, "http-body")
        self._most = most_waiting
        self._pending = 0
        self._large = asyncio.Semaphore(1)

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns what `work` does, which is about so many bytes; small work is done at once.

        Raises:
            Overloaded: too much is waiting already.
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
            # Also where nobody waits for it any more, the thread is busy.
            if not future.cancel():
                await asyncio.gather(future, return_exceptions=True)
            raise
        finally:
            del future  # what it raised names this frame, which would name it

    def close(self) -> None:
        """Ends the threads once they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


OFF_LOOP: web.AppKey[BoundedThreadPool] = web.AppKey("off_loop", BoundedThreadPool)


def require_announced(request: web.Request, most_bytes: int) -> None:
    """Returns if the body may be read, by what its headers say.

    Raises:
        PayloadTooLarge: it is announced to have more than `most_bytes`.
        InvalidInput: it is encoded as nobody here can decode.
    """
    if (request.content_length or 0) > most_bytes:
        raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
    encoding = _encoding_of(request)
    if encoding and encoding not in _WINDOWS:
        raise InvalidInput("Content-Encoding", f"{encoding[:40]!r} is not understood here")


async def body_of(
    request: web.Request, most_bytes: int, permit: ConcurrencyPermit | None = None
) -> bytes:
    """Returns the body, inflated.

    Args:
        request: Whose.
        most_bytes: More is refused as soon as it is there.
        permit: Holds what is there; None for bodies that are always small.

    Raises:
        PayloadTooLarge: it has more than `most_bytes`.
        Overloaded: there is no room for it.
        DeadlineExceeded: it came too slowly.
        InvalidInput: it is not compressed as announced.
    """
    require_announced(request, most_bytes)
    body = await _received(request, most_bytes, permit)
    encoding = _encoding_of(request)
    if encoding:
        window = _WINDOWS[encoding]
        likely = min(most_bytes, len(body) * MOST_RATIO)
        if permit is not None:
            permit.hold(len(body) + likely)
        _note_read(likely)
        off_loop = request.app[OFF_LOOP]
        body = await off_loop.run(likely, lambda: inflated(body, window, most_bytes))
    if permit is not None:
        permit.hold(len(body))
    _note_read(len(body))
    return body


def inflated(body: bytes, window: int, most_bytes: int) -> bytes:
    """Returns `body` decompressed, a step at a time: other threads go on between.

    Raises:
        PayloadTooLarge: it is more than `most_bytes`, or much more than its size.
        InvalidInput: it does not decompress, or is followed by something.
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
    pieces: list[bytes] = []
    total = 0
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LONGEST_S
    try:
        async with asyncio.timeout(SILENCE_S) as silence:
            while piece := await request.content.readany():
                total += len(piece)
                if total > most_bytes:
                    raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
                if permit is not None:
                    permit.hold(total)
                pieces.append(piece)
                silence.reschedule(min(loop.time() + SILENCE_S, end_s))
    except TimeoutError:
        raise DeadlineExceeded(
            "the body did not arrive in time", details={"stage": "arrival"}
        ) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise InvalidInput("body", "is not framed as its headers say") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _note_read(nbytes: int) -> None:
    """Notes what the request cost, should it turn out to be its sender's fault."""
    if (found := caller.get()) is not None:
        found.read_bytes = nbytes


def _encoding_of(request: web.Request) -> str:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def _not_as_announced() -> InvalidInput:
    return InvalidInput("body", "does not decompress as its Content-Encoding says")
