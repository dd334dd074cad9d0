"""The items of a response while they come, each with its object and the events that tell of it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]
Event = tuple[str, Document]
"""The name of an event, and its fields beside the item's place."""


def new_id(prefix: str) -> str:
    """Returns a new id, which cannot be guessed: callers without keys need nothing else."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseItem(ABC):
    """An item that grows by pieces of text."""

    def __init__(self, prefix: str) -> None:
        self.id = new_id(prefix)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything that has come."""
        return "".join(self._pieces)

    @abstractmethod
    def document(self, status: str) -> Document:
        """Returns the item as far as it has come."""

    def opening(self) -> Iterable[Event]:
        """Yields the events behind the one that adds the item."""
        return ()

    def grow(self, text: str) -> Event:
        """Takes a piece, and returns the event that tells of it."""
        self._pieces.append(text)
        return self._delta(text)

    @abstractmethod
    def closing(self) -> Iterable[Event]:
        """Yields the events before the one that ends the item."""

    @abstractmethod
    def _delta(self, text: str) -> Event: ...


class MessageItem(ResponseItem):
    """The text that is meant for the reader."""

    def __init__(self) -> None:
        super().__init__("msg")

    def document(self, status: str) -> Document:
        """Returns the message as far as it has come."""
        # What was opened has a part, which may be empty.
        content = [] if status == "in_progress" else [_text_part(self.text)]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def opening(self) -> Iterable[Event]:
        """Yields the event that adds its only part."""
        yield "response.content_part.added", {"content_index": 0, "part": _text_part("")}

    def closing(self) -> Iterable[Event]:
        """Yields the events that end its only part."""
        text = self.text
        done = {"content_index": 0, "text": text, "logprobs": []}
        yield "response.output_text.done", done
        yield "response.content_part.done", {"content_index": 0, "part": _text_part(text)}

    def _delta(self, text: str) -> Event:
        delta = {"content_index": 0, "delta": text, "logprobs": []}
        return "response.output_text.delta", delta


class ReasoningItem(ResponseItem):
    """The reasoning that a model writes before it answers."""

    def __init__(self) -> None:
        super().__init__("rs")

    def document(self, status: str) -> Document:
        """Returns the reasoning as far as it has come."""
        content = [] if status == "in_progress" else [_reasoning_part(self.text)]
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }

    def opening(self) -> Iterable[Event]:
        """Yields the event that adds its only part."""
        yield "response.content_part.added", {"content_index": 0, "part": _reasoning_part("")}

    def closing(self) -> Iterable[Event]:
        """Yields the events that end its only part."""
        text = self.text
        yield "response.reasoning_text.done", {"content_index": 0, "text": text}
        yield "response.content_part.done", {"content_index": 0, "part": _reasoning_part(text)}

    def _delta(self, text: str) -> Event:
        return "response.reasoning_text.delta", {"content_index": 0, "delta": text}


class FunctionCallItem(ResponseItem):
    """A call of a tool, whose text are its arguments."""

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__("fc")
        self.call_id = call_id
        self.name = name
        self.is_broken = False
        """True if it ended before its arguments were complete."""

    def document(self, status: str) -> Document:
        """Returns the call as far as it has come."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": "incomplete" if self.is_broken else status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def closing(self) -> Iterable[Event]:
        """Yields the event that ends the arguments."""
        done = {"arguments": self.text, "name": self.name}
        yield "response.function_call_arguments.done", done

    def _delta(self, text: str) -> Event:
        return "response.function_call_arguments.delta", {"delta": text}


def _text_part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> Document:
    return {"type": "reasoning_text", "text": text}
