"""The object of a message, and the events of a streamed one, as Anthropic's clients parse them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.openai_http.calls.event_streams import event_of
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import anthropic_body

Document = dict[str, Any]


@dataclass(slots=True)
class MessageWriter:
    """A writer of one message, whole or event by event; implements `EventWriter`."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def whole(self, generation: GenerationStream, text: str, finish_reason: str) -> Document:
        """Returns a message that is complete."""
        return {
            **self._document([{"type": "text", "text": text}]),
            **_end(generation, finish_reason),
            "usage": _usage(generation),
        }

    def begin(self, generation: GenerationStream) -> Iterable[bytes]:
        """Yields the events before the first text."""
        document = {**self._document([]), "stop_reason": None, "stop_sequence": None}
        document["usage"] = {**_usage(generation), "output_tokens": 0}
        yield _event("message_start", message=document)
        block = {"type": "text", "text": ""}
        yield _event("content_block_start", index=0, content_block=block)

    def text(self, text: str) -> Iterable[bytes]:
        """Yields the event of new text."""
        delta = {"type": "text_delta", "text": text}
        yield _event("content_block_delta", index=0, delta=delta)

    def end(self, generation: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Yields the events after the last text."""
        yield _event("content_block_stop", index=0)
        usage = {"output_tokens": generation.completion_tokens}
        yield _event("message_delta", delta=_end(generation, finish_reason), usage=usage)
        yield _event("message_stop")

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the event of a message that ends with an error."""
        yield event_of(anthropic_body(error), "error")

    def _document(self, content: list[Document]) -> Document:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
        }


def _end(generation: GenerationStream, finish_reason: str) -> Document:
    stop_text = generation.stop_text
    if stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
    reason = "max_tokens" if finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(generation: GenerationStream) -> Document:
    return {
        "input_tokens": generation.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
    }


def _event(kind: str, **facts: object) -> bytes:
    return event_of({"type": kind, **facts}, kind)
