"""Answers as server-sent events, at the pace of their client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from catenary_gateway.generation.choices import ChoiceStreams
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.answer_parts import AnswerParts
from catenary_gateway.openai_http.answers import AnswerWriter, prediction_headers, usage_of
from catenary_services.grpc.error_tables import error_of_exception, openai_body

READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""
LAST_EVENT = b"data: [DONE]\n\n"
_Pieces = AsyncIterator[tuple[int, AnswerChunk]]


def event_of(document: dict[str, Any]) -> bytes:
    """Returns a JSON object encoded as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def stream_answer(
    request: web.Request, writer: AnswerWriter, answers: ChoiceStreams, headers: dict[str, str]
) -> web.StreamResponse:
    """Streams an answer, after waiting for the first token of any choice.

    Raises:
        CatenaryError: The generation failed before its first token; the status can still say so.
    """
    async with aclosing(answers.pieces()) as pieces:
        first = await anext(pieces)
        index = first[0]
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
                **prediction_headers(answers.streams[index]),
            }
        )
        try:
            async with asyncio.timeout(READ_GRACE_S):
                await response.prepare(request)
            await _write(response, writer, answers, first, pieces)
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
    writer: AnswerWriter,
    answers: ChoiceStreams,
    first: tuple[int, AnswerChunk],
    pieces: _Pieces,
) -> None:
    events = _ChunkEvents(writer, answers)
    read: tuple[int, AnswerChunk] | None = first
    while read is not None:
        for event in events.of(*read):
            await _send(response, event)
        try:
            read = await anext(pieces, None)
        except Exception as exc:
            # The status was sent long ago, so the error is sent as the last event.
            await _send(response, event_of(openai_body(error_of_exception(exc))))
            return
    if writer.wanted.include_usage:
        await _send(response, event_of(writer.usage_chunk(usage_of(answers))))


class _ChunkEvents:
    """The chunks of one stream, in which choices take turns as their tokens come."""

    def __init__(self, writer: AnswerWriter, answers: ChoiceStreams) -> None:
        self._writer = writer
        self._answers = answers
        self._parts: dict[int, AnswerParts] = {}
        self._starts: dict[int, int] = {}
        """The number of characters in front of the answer, of each choice that has begun."""

    def of(self, index: int, piece: AnswerChunk) -> list[bytes]:
        """Returns the chunks of one piece of a choice, and of its beginning."""
        writer, stream = self._writer, self._answers.streams[index]
        usage = usage_of(self._answers) if writer.wanted.continuous_usage else None
        documents = []
        if index not in self._starts:
            self._starts[index] = 0
            self._parts[index] = writer.parts(stream)
            if writer.chat:
                documents.append(writer.chunk(index, self._parts[index].first_delta(), "", usage))
            elif (echoed := writer.echoed(index, stream)) is not None:
                self._starts[index] = len(echoed.text)
                logprobs = writer.logprobs(stream, (), echoed)
                delta = {"content": echoed.text}
                documents.append(writer.chunk(index, delta, "", usage, logprobs=logprobs))
        parts = self._parts[index]
        deltas = parts.take(piece)
        if deltas or piece.finish_reason or (piece.scored and writer.wanted.logprobs is not None):
            *earlier, last = deltas or [{}]
            documents += [writer.chunk(index, delta, "", usage) for delta in earlier]
            reason = parts.finish_reason(piece.finish_reason)
            logprobs = writer.logprobs(stream, piece.scored, start=self._starts[index])
            documents.append(writer.chunk(index, last, reason, usage, logprobs=logprobs))
        return [event_of(document) for document in documents]
