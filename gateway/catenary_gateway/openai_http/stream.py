"""A streamed answer: server-sent events, written as fast as the client reads them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from catenary_gateway.generation.answer import Generation
from catenary_gateway.generation.request import Piece
from catenary_gateway.openai_http.answers import (
    LAST_EVENT,
    Writer,
    event_of,
    prediction_headers,
    usage_of,
)
from catenary_gateway.openai_http.wanted import Wanted
from catenary_services.grpc.error_tables import error_of_exception, openai_body

READ_GRACE_S = 30.0
"""A client that reads nothing of its answer for so long is given up: what waits takes memory."""


async def stream_answer(
    request: web.Request,
    wanted: Wanted,
    writer: Writer,
    generation: Generation,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Streams an answer, waiting for its first token before anything is sent.

    Raises:
        CatenaryError: it ended before the first token, so that there is a status to say it with.
    """
    first = await generation.next()
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **headers,
            **prediction_headers(generation),
        }
    )
    try:
        async with asyncio.timeout(READ_GRACE_S):
            await response.prepare(request)
        await _write(response, wanted, writer, generation, first)
        await _send(response, LAST_EVENT)
        async with asyncio.timeout(READ_GRACE_S):
            await response.write_eof()
    except ConnectionError:
        # The client is gone, found out while writing.
        return response
    except TimeoutError:
        # The client stopped reading: nothing can be said to it, and it holds memory.
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send(response: web.StreamResponse, event: bytes) -> None:
    """Writes an event; waits for a slow client as long as it reads at all.

    Raises:
        TimeoutError: the client has not read for `READ_GRACE_S`.
    """
    async with asyncio.timeout(READ_GRACE_S):
        await response.write(event)


async def _write(
    response: web.StreamResponse,
    wanted: Wanted,
    writer: Writer,
    generation: Generation,
    piece: Piece | None,
) -> None:
    continuous = wanted.continuous_usage
    if writer.chat:
        usage = usage_of(generation) if continuous else None
        await _send(response, event_of(writer.chunk("", "", usage, first=True)))
    while piece is not None:
        if piece.text or piece.finish_reason:
            usage = usage_of(generation) if continuous else None
            await _send(response, event_of(writer.chunk(piece.text, piece.finish_reason, usage)))
        if piece.finish_reason:
            break
        try:
            piece = await generation.next()
        except Exception as exc:
            # The status is long out; never cut off silently.
            await _send(response, event_of(openai_body(error_of_exception(exc))))
            return
    if wanted.include_usage:
        await _send(response, event_of(writer.usage_chunk(usage_of(generation))))
