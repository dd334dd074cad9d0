"""The object of a response, and the events of a streamed one, as OpenAI's clients parse them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from catenary_gateway.generation.forms.events import (
    AnswerEvent,
    ArgumentsPiece,
    CallBroken,
    CallComplete,
    CallStart,
    ContentPiece,
    ReasoningPiece,
)
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.openai_http.calls.event_streams import event_of
from catenary_gateway.openai_http.responses.response_items import (
    Document,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    ResponseItem,
    new_id,
)
from catenary_gateway.openai_http.responses.response_request import ResponseBody
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_details import public_message

Keep = Callable[[Document, dict[str, Any]], None]
"""Called with a complete response and the message of a chat that it is, before the client learns
that it is complete. It sets `store` in the response to whether it is kept."""


@dataclass(slots=True)
class ResponseWriter:
    """A writer of one response; implements `ItemWriter`."""

    body: ResponseBody
    keep: Keep
    id: str = field(default_factory=lambda: new_id("resp"))
    document: Document = field(default_factory=dict)
    """The response, once it is complete."""
    _created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _items: list[ResponseItem] = field(default_factory=list)
    _is_open: bool = False
    """True while the last item may grow."""

    def begin(self, stream: GenerationStream) -> Iterable[bytes]:
        """Yields the events before the first item."""
        started = self._document("in_progress", [])
        yield self._event("response.created", {"response": started})
        yield self._event("response.in_progress", {"response": started})

    def take(self, event: AnswerEvent) -> Iterable[bytes]:
        """Takes what comes next in the answer, and yields the events that tell of it."""
        match event:
            case ContentPiece(text):
                yield from self._open_unless(MessageItem)
                yield self._grown(text)
            case ReasoningPiece(text):
                yield from self._open_unless(ReasoningItem)
                yield self._grown(text)
            case CallStart(_, call_id, name):
                yield from self._open(FunctionCallItem(call_id, name))
            case ArgumentsPiece(_, text):
                yield self._grown(text)
            case CallComplete():
                yield from self._close("completed")
            case CallBroken():
                call = self._items[-1]
                if isinstance(call, FunctionCallItem):
                    call.is_broken = True
                yield from self._close("incomplete")

    def end(self, stream: GenerationStream, finish_reason: str) -> Iterable[bytes]:
        """Takes the end of the answer, and yields the events after the last item."""
        status = "incomplete" if finish_reason == "length" else "completed"
        if not self._items:
            yield from self._open(MessageItem())
        yield from self._close(status)
        *earlier, last = self._items
        output = [*(each.document("completed") for each in earlier), last.document(status)]
        self.document = self._document(status, output)
        if status == "incomplete":
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        self.document["usage"] = _usage(stream)
        self.keep(self.document, self._message())
        yield self._event(f"response.{status}", {"response": self.document})

    def failed(self, error: CatenaryError) -> Iterable[bytes]:
        """Yields the event of a response that ends with an error."""
        document = self._document("failed", [])
        document["error"] = {"code": "server_error", "message": public_message(error)}
        yield self._event("response.failed", {"response": document})

    def _open_unless(self, kind: type[MessageItem] | type[ReasoningItem]) -> Iterable[bytes]:
        """Opens an item, unless one of its kind is open."""
        if not (self._is_open and isinstance(self._items[-1], kind)):
            yield from self._open(kind())

    def _grown(self, text: str) -> bytes:
        return self._item_event(*self._items[-1].grow(text))

    def _open(self, item: ResponseItem) -> Iterable[bytes]:
        yield from self._close("completed")
        self._items.append(item)
        self._is_open = True
        place = {"output_index": len(self._items) - 1, "item": item.document("in_progress")}
        yield self._event("response.output_item.added", place)
        for name, facts in item.opening():
            yield self._item_event(name, facts)

    def _close(self, status: str) -> Iterable[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        for name, facts in item.closing():
            yield self._item_event(name, facts)
        place = {"output_index": len(self._items) - 1, "item": item.document(status)}
        yield self._event("response.output_item.done", place)

    def _message(self) -> dict[str, Any]:
        """Returns the answer as the message of a chat that it is; reasoning is not continued."""
        texts = [each.text for each in self._items if isinstance(each, MessageItem)]
        calls = [
            {
                "id": each.call_id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.text},
            }
            for each in self._items
            if isinstance(each, FunctionCallItem) and not each.is_broken
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return message | {"tool_calls": calls} if calls else message

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
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _item_event(self, kind: str, facts: Document) -> bytes:
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return self._event(kind, {**place, **facts})

    def _event(self, kind: str, facts: Document) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **facts}
        self._sequence += 1
        return event_of(event, kind)


def _usage(stream: GenerationStream) -> Document:
    prompt, answer = stream.prompt_tokens, stream.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": stream.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }
