"""Answers as server-sent events, at the pace of the client who reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from catenary_gateway.generation.plane import GenerationStream
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import error_of_exception

READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event_of(document: Mapping[str, Any], name: str = "") -> bytes:
    """Returns a JSON object encoded as a server-sent event, with its name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def prediction_headers(generation: GenerationStream) -> dict[str, str]:
    """Returns headers with the scheduler's predictions for an answer, in milliseconds.

    OpenAI's bodies have no place for predictions. A prediction that is unknown has no header.
    """
    report = generation.objectives
    predicted_ns = {
        "x-predicted-ttft-ms": report.predicted_first_token_ns,
        "x-predicted-tpot-ms": report.predicted_per_token_ns,
    }
    return {name: f"{ns / 1e6:.3f}" for name, ns in predicted_ns.items() if ns}


async def streamed(
    request: web.Request,
    headers: Mapping[str, str],
    write: Callable[[web.StreamResponse], Awaitable[None]],
) -> web.StreamResponse:
    """Returns the response whose events `write` has sent, as far as its client reads them."""
    response = web.StreamResponse(headers={**_HEADERS, **headers})
    try:
        async with asyncio.timeout(READ_GRACE_S):
            await response.prepare(request)
        await write(response)
        async with asyncio.timeout(READ_GRACE_S):
            await response.write_eof()
    except ConnectionError:
        # The client went away, which shows only in a write.
        return response
    except TimeoutError:
        # The client has stopped reading, so no error can reach it, and it holds memory.
        if request.transport is not None:
            request.transport.abort()
    return response


async def send(response: web.StreamResponse, event: bytes) -> None:
    """Writes an event, and waits for a slow client as long as it reads at all.

    Raises:
        TimeoutError: The client has not read for `READ_GRACE_S`.
    """
    async with asyncio.timeout(READ_GRACE_S):
        await response.write(event)


class EventWriter(Protocol):
    """A writer of the events of one answer, in the form of one protocol."""

    def begin(self, generation: GenerationStream) -> Iterable[bytes]:
        """Yields the events before the first text."""
        ...

    def text(self, text: str) -> Iterable[bytes]:
        """Yields the events of new text."""
        ...

    def end(self, generation: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Yields the events after the last text."""
        ...

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the events of an answer that ends with an error behind its first token."""
        ...


async def stream_events(
    request: web.Request,
    headers: Mapping[str, str],
    generation: GenerationStream,
    writer: EventWriter,
) -> web.StreamResponse:
    """Streams an answer in the form of `writer`, after waiting for its first token.

    Raises:
        CatenaryError: The generation failed before its first token; the status can still say so.
    """
    first = await generation.next()

    async def write(response: web.StreamResponse) -> None:
        piece, reason = first, ""
        for event in writer.begin(generation):
            await send(response, event)
        while piece is not None:
            for event in writer.text(piece.text) if piece.text else ():
                await send(response, event)
            reason = piece.finish_reason
            if reason:
                break
            try:
                piece = await generation.next()
            except Exception as exc:
                # The status was sent long ago, so the error is sent as the last event.
                for event in writer.failed(error_of_exception(exc)):
                    await send(response, event)
                return
        for event in writer.end(generation, reason):
            await send(response, event)

    return await streamed(request, {**headers, **prediction_headers(generation)}, write)


async def whole_text(generation: GenerationStream) -> tuple[str, str]:
    """Returns the text of an answer and the reason of its end, after waiting for all of it.

    Raises:
        CatenaryError: The generation failed.
    """
    parts: list[str] = []
    finish_reason = ""
    while (piece := await generation.next()) is not None:
        parts.append(piece.text)
        finish_reason = piece.finish_reason
    return "".join(parts), finish_reason
