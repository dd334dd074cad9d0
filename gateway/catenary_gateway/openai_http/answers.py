"""Answers in the form that OpenAI's clients parse: JSON objects, whole or as server-sent events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.calls.event_streams import event_of, prediction_headers, streamed
from catenary_gateway.openai_http.calls.event_streams import send as _send
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_services.grpc.error_tables import error_of_exception, openai_body


def usage_of(generation: GenerationStream) -> dict[str, Any]:
    """Returns the `usage` object: the numbers of tokens in the prompt and in the answer."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """A writer of the answer to one request, whole or chunk by chunk."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage}

    def chunk(
        self, text: str, finish_reason: str, usage: dict[str, Any] | None, *, first: bool = False
    ) -> dict[str, Any]:
        """Returns one chunk of a stream.

        Args:
            text: The new text; may be empty.
            finish_reason: The reason in the last chunk of the choice; empty in all others.
            usage: The usage so far; None leaves it out.
            first: Whether this chunk opens the answer; only chats have such a chunk.
        """
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish_reason or None,
        }
        if not self.chat:
            choice["text"] = text
        elif first:
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["delta"] = {"content": text} if text else {}
        chunk = {**self._head(self._chunk_kind), "choices": [choice]}
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the chunk after the last one of a stream, which holds only the usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


LAST_EVENT = b"data: [DONE]\n\n"


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

    async def write(response: web.StreamResponse) -> None:
        await _write(response, wanted, writer, generation, first)
        await _send(response, LAST_EVENT)

    return await streamed(request, {**headers, **prediction_headers(generation)}, write)


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
