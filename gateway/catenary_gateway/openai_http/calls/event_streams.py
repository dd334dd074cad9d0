"""Answers as server-sent events, at the pace of the client who reads them."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from catenary_gateway.generation.forms.events import AnswerEvent, AnswerParser
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import AnswerChunk
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import error_of_exception

READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event_of(document: Mapping[str, Any], name: str = "") -> bytes:
    """Returns a JSON object encoded as a server-sent event, with its name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(document).encode() + b"\n\n"


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


class ItemWriter(Protocol):
    """A writer of one answer in the form of one protocol, whole or event by event.

    An answer is a row of items: text, reasoning, and calls of tools.
    """

    def begin(self, stream: GenerationStream) -> Iterable[bytes]:
        """Yields the events before the first item."""
        ...

    def take(self, event: AnswerEvent) -> Iterable[bytes]:
        """Takes what comes next in the answer, and yields the events that tell of it."""
        ...

    def end(self, stream: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Takes the end of the answer, and yields the events after the last item."""
        ...

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the events of an answer that ends with an error behind its first token."""
        ...


async def stream_items(
    request: web.Request, headers: Mapping[str, str], stream: GenerationStream, writer: ItemWriter
) -> web.StreamResponse:
    """Streams an answer in the form of `writer`, after waiting for its first token.

    Raises:
        CatenaryError: The generation failed before its first token; the status can still say so.
    """
    first = await stream.next()

    async def write(response: web.StreamResponse) -> None:
        parser = stream.request.syntax.parser()
        piece, reason = first, ""
        for event in writer.begin(stream):
            await send(response, event)
        while piece is not None:
            reason = piece.finish_reason
            for taken in _events(parser, piece):
                for event in writer.take(taken):
                    await send(response, event)
            try:
                piece = await stream.next()
            except Exception as exc:
                # The status was sent long ago, so the error is sent as the last event.
                for event in writer.failed(error_of_exception(exc)):
                    await send(response, event)
                return
        for event in writer.end(stream, reason):
            await send(response, event)

    return await streamed(request, {**headers, **prediction_headers(stream)}, write)


async def write_items(stream: GenerationStream, writer: ItemWriter) -> None:
    """Has `writer` take a whole answer, after waiting for all of it.

    Raises:
        CatenaryError: The generation failed.
    """
    parser, reason = stream.request.syntax.parser(), ""
    _exhaust(writer.begin(stream))
    while (piece := await stream.next()) is not None:
        reason = piece.finish_reason
        for event in _events(parser, piece):
            _exhaust(writer.take(event))
    _exhaust(writer.end(stream, reason))


def _exhaust(events: Iterable[bytes]) -> None:
    deque(events, maxlen=0)  # a generator works as it is read


def _events(parser: AnswerParser, piece: AnswerChunk) -> list[AnswerEvent]:
    pushed = list(parser.push(piece.text))
    return [*pushed, *parser.end()] if piece.finish_reason else pushed
