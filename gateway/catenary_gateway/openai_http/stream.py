"""The streaming of an answer as server-sent events, at the pace of its client."""

from __future__ import annotations

import asyncio

from aiohttp import web

from catenary_gateway.generation.answer import GenerationStream
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.answers import (
    LAST_EVENT,
    AnswerWriter,
    event_of,
    prediction_headers,
    usage_of,
)
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_services.grpc.error_tables import error_of_exception, openai_body

READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""


async def stream_answer(
    request: web.Request,
    wanted: CompletionRequest,
    writer: AnswerWriter,
    generation: GenerationStream,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Streams an answer, after waiting for its first token.

    Raises:
        CatenaryError: The generation failed before its first token; the status can still say so.
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
        # The client went away, which shows only in a write.
        return response
    except TimeoutError:
        # The client has stopped reading, so no error can reach it, and it holds memory.
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send(response: web.StreamResponse, event: bytes) -> None:
    """Writes an event, and waits for a slow client as long as it reads at all.

    Raises:
        TimeoutError: The client has not read for `READ_GRACE_S`.
    """
    async with asyncio.timeout(READ_GRACE_S):
        await response.write(event)


async def _write(
    response: web.StreamResponse,
    wanted: CompletionRequest,
    writer: AnswerWriter,
    generation: GenerationStream,
    piece: AnswerChunk | None,
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
            # The status was sent long ago, so the error is sent as the last event.
            await _send(response, event_of(openai_body(error_of_exception(exc))))
            return
    if wanted.include_usage:
        await _send(response, event_of(writer.usage_chunk(usage_of(generation))))
