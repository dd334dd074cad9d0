"""The object of a message, and the events of a streamed one, as Anthropic's clients parse them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from catenary_gateway.generation.forms.events import (
    AnswerEvent,
    ArgumentsPiece,
    CallBroken,
    CallComplete,
    CallStart,
    ContentPiece,
)
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.openai_http.calls.event_streams import event_of
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import anthropic_body

Document = dict[str, Any]


@dataclass(slots=True)
class MessageWriter:
    """A writer of one message; implements `ItemWriter`. What the model thinks is left out."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    document: Document = field(default_factory=dict)
    """The message, once it is complete."""
    _blocks: list[Document] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    """The last block as far as it has come: text, or the input of a tool."""
    _is_open: bool = False
    """True while the last block may grow."""
    _calls: bool = False
    """True once a call is complete."""

    def begin(self, stream: GenerationStream) -> Iterable[bytes]:
        """Yields the event before the first block."""
        document = {**self._document(), "stop_reason": None, "stop_sequence": None}
        document["usage"] = {**_usage(stream), "output_tokens": 0}
        yield _event("message_start", message=document)

    def take(self, event: AnswerEvent) -> Iterable[bytes]:
        """Takes what comes next in the answer, and yields the events that tell of it."""
        match event:
            case ContentPiece(text):
                if not (self._is_open and self._blocks[-1]["type"] == "text"):
                    yield from self._open({"type": "text", "text": ""})
                yield self._grow(text, {"type": "text_delta", "text": text})
            case CallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._open(call)
            case ArgumentsPiece(_, text):
                yield self._grow(text, {"type": "input_json_delta", "partial_json": text})
            case CallComplete():
                self._calls = True
                yield from self._close()
            case CallBroken(_, written):
                # Its input is no JSON, so in a whole message it can only be text.
                yield from self._close(broken=written)

    def end(self, stream: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Takes the end of the answer, and yields the events after the last block."""
        if not self._blocks:
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        ended = self._end(stream, finish_reason)
        self.document = {**self._document(), "content": self._blocks, **ended}
        self.document["usage"] = _usage(stream)
        usage = {"output_tokens": stream.completion_tokens}
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the event of a message that ends with an error."""
        yield event_of(anthropic_body(error), "error")

    def _open(self, block: Document) -> Iterable[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        yield _event("content_block_start", index=index, content_block=dict(block))

    def _grow(self, text: str, delta: Document) -> bytes:
        self._pieces.append(text)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self, broken: str | None = None) -> Iterable[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        text, block = "".join(self._pieces), self._blocks[-1]
        self._pieces.clear()
        if broken is not None:
            self._blocks[-1] = {"type": "text", "text": broken}
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = json.loads(text)
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _document(self) -> Document:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
        }

    def _end(self, stream: GenerationStream, finish_reason: str) -> Document:
        if stream.stop_text:
            return {"stop_reason": "stop_sequence", "stop_sequence": stream.stop_text}
        usual = "tool_use" if self._calls else "end_turn"
        reason = "max_tokens" if finish_reason == "length" else usual
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(stream: GenerationStream) -> Document:
    return {
        "input_tokens": stream.prompt_tokens - stream.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stream.cached_tokens,
        "output_tokens": stream.completion_tokens,
    }


def _event(kind: str, **facts: object) -> bytes:
    return event_of({"type": kind, **facts}, kind)
