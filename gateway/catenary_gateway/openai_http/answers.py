"""Answers in the form that OpenAI's clients parse: JSON objects, whole or as server-sent events.

Events are sent at the pace of their client.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from catenary_gateway.catalog import Model
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.chat_parts import ChatParts, Delta
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_services.grpc.error_tables import error_of_exception, openai_body

OWNER = "catenary"
READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""


def model_document(model: Model, reference: str) -> dict[str, Any]:
    """Returns a model's entry in the list of `/v1/models`."""
    return {
        "id": reference,
        "object": "model",
        "created": _STARTED,
        "owned_by": OWNER,
        # vLLM's name for it; load tools look for it.
        "max_model_len": model.session_tokens,
    }


def usage_of(generation: GenerationStream) -> dict[str, Any]:
    """Returns the `usage` object: the numbers of tokens in the prompt and in the answer."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


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


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """A writer of the answer to one request, whole or chunk by chunk."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, parts: ChatParts, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        choice["finish_reason"] = parts.finish_reason(finish_reason)
        if self.chat:
            choice["message"] = parts.message()
        else:
            choice["text"] = parts.message()["content"]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage}

    def chunk(
        self, delta: Delta, finish_reason: str, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns one chunk of a stream.

        Args:
            delta: What is new; may be empty. Of completions only the content counts.
            finish_reason: The reason in the last chunk of the choice; empty in all others.
            usage: The usage so far; None leaves it out.
        """
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish_reason or None,
        }
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
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


def event_of(document: dict[str, Any]) -> bytes:
    """Returns a JSON object encoded as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
_STARTED = int(time.time())


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
    def usage() -> dict[str, Any] | None:
        return usage_of(generation) if wanted.continuous_usage else None

    parts = ChatParts(generation.parser(), reasoning=wanted.include_reasoning)
    if writer.chat:
        await _send(response, event_of(writer.chunk(parts.first_delta(), "", usage())))
    while piece is not None:
        *deltas, last = parts.take(piece) or [{}]
        for delta in deltas:
            await _send(response, event_of(writer.chunk(delta, "", usage())))
        if last or piece.finish_reason:
            reason = parts.finish_reason(piece.finish_reason)
            await _send(response, event_of(writer.chunk(last, reason, usage())))
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
