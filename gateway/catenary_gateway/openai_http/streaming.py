"""The chunks of completions and chats, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from aiohttp import web

from catenary_gateway.generation.choices import ChoiceStreams
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.answer_parts import AnswerParts
from catenary_gateway.openai_http.answers import AnswerWriter, usage_of
from catenary_gateway.openai_http.calls.event_streams import (
    event_of,
    prediction_headers,
    send,
    streamed,
)
from catenary_services.grpc.error_tables import error_of_exception, openai_body

LAST_EVENT = b"data: [DONE]\n\n"
_Pieces = AsyncIterator[tuple[int, AnswerChunk]]


async def stream_answer(
    request: web.Request, writer: AnswerWriter, answers: ChoiceStreams, headers: dict[str, str]
) -> web.StreamResponse:
    """Streams an answer, after waiting for the first token of any choice.

    Raises:
        CatenaryError: The generation failed before its first token; the status can still say so.
    """
    async with aclosing(answers.pieces()) as pieces:
        first = await anext(pieces)

        async def write(response: web.StreamResponse) -> None:
            await _write(response, writer, answers, first, pieces)
            await send(response, LAST_EVENT)

        predicted = prediction_headers(answers.streams[first[0]])
        return await streamed(request, {**headers, **predicted}, write)


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
        chunks = events.of(*read)
        if chunks:
            await send(response, b"".join(chunks))
        try:
            read = await anext(pieces, None)
        except Exception as exc:
            # The status was sent long ago, so the error is sent as the last event.
            await send(response, event_of(openai_body(error_of_exception(exc))))
            return
    if writer.wanted.include_usage:
        await send(response, event_of(writer.usage_chunk(usage_of(answers))))


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
