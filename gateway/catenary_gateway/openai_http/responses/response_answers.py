"""The object of a response, and the events of a streamed one, as OpenAI's clients parse them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.openai_http.calls.event_streams import event_of
from catenary_gateway.openai_http.responses.response_request import ResponseBody
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_details import public_message

Document = dict[str, Any]
Keep = Callable[[Document, str], None]
"""Called with a complete response and its text, before the client learns that it is complete. It
sets `store` in the response to whether it is kept."""
_PLACE = {"output_index": 0, "content_index": 0}


def _new_id(prefix: str) -> str:
    # An id is all that leads to a response where callers have no keys, so it cannot be guessed.
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class ResponseWriter:
    """A writer of one response, whole or event by event; implements `EventWriter`."""

    body: ResponseBody
    keep: Keep
    id: str = field(default_factory=lambda: _new_id("resp"))
    _message_id: str = field(default_factory=lambda: _new_id("msg"))
    _created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _texts: list[str] = field(default_factory=list)

    def whole(self, generation: GenerationStream, text: str, finish_reason: str) -> Document:
        """Returns a response that is complete."""
        document = self._ended(generation, text, finish_reason)
        self.keep(document, text)
        return document

    def begin(self, generation: GenerationStream) -> Iterable[bytes]:
        """Yields the events before the first text."""
        started = self._document("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        item = self._item("in_progress", None)
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=_part(""))

    def text(self, text: str) -> Iterable[bytes]:
        """Yields the event of new text."""
        self._texts.append(text)
        yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def end(self, generation: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Yields the events after the last text."""
        text = "".join(self._texts)
        document = self._ended(generation, text, finish_reason)
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=_part(text))
        (item,) = document["output"]
        yield self._event("response.output_item.done", output_index=0, item=item)
        self.keep(document, text)
        yield self._event(f"response.{document['status']}", response=document)

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the event of a response that ends with an error."""
        document = self._document("failed", [])
        document["error"] = {"code": "server_error", "message": public_message(error)}
        yield self._event("response.failed", response=document)

    def _ended(self, generation: GenerationStream, text: str, finish_reason: str) -> Document:
        status = "incomplete" if finish_reason == "length" else "completed"
        document = self._document(status, [self._item(status, text)])
        if status == "incomplete":
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        document["usage"] = _usage(generation)
        return document

    def _document(self, status: str, output: list[Document]) -> Document:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        }

    def _item(self, status: str, text: str | None) -> Document:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [_part(text)],
        }

    def _part_event(self, kind: str, **facts: object) -> bytes:
        return self._event(kind, item_id=self._message_id, **_PLACE, **facts)

    def _event(self, kind: str, **facts: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **facts}
        self._sequence += 1
        return event_of(event, kind)


def _part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generation: GenerationStream) -> Document:
    prompt, answer = generation.prompt_tokens, generation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }
