"""The JSON objects of answers, in the form that OpenAI's clients parse."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from catenary_gateway.catalog import Model
from catenary_gateway.generation.answer import GenerationStream

OWNER = "catenary"


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


def event_of(document: dict[str, Any]) -> bytes:
    """Returns a JSON object encoded as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
_STARTED = int(time.time())
