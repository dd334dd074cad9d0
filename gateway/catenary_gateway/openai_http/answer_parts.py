"""The parts of one answer, as OpenAI's clients read them: a message, or deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catenary_gateway.generation.forms.events import (
    AnswerEvent,
    AnswerParser,
    ArgumentsPiece,
    CallBroken,
    CallComplete,
    CallStart,
    ContentParser,
    ContentPiece,
    ReasoningPiece,
)
from catenary_gateway.generation.request import AnswerChunk

Delta = dict[str, Any]


class AnswerParts:
    """The content, reasoning and calls of one answer, while it comes.

    A call that breaks off stays in a stream, as far as it came. In a whole answer it is content.
    """

    def __init__(self, parser: AnswerParser, *, reasoning: bool = True) -> None:
        """Begins an answer.

        Args:
            parser: The reader of its text.
            reasoning: Whether to return the reasoning, too.
        """
        self._parser = parser
        self._has_reasoning = reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, Delta] = {}
        self._complete = False
        """True once a call is complete."""

    def first_delta(self) -> Delta:
        """Returns the delta that opens a stream."""
        is_text = isinstance(self._parser, ContentParser)
        return {"role": "assistant", "content": "" if is_text else None}

    def take(self, piece: AnswerChunk) -> Sequence[Delta]:
        """Returns the deltas that a piece of the answer becomes."""
        events = list(self._parser.push(piece.text))
        if piece.finish_reason:
            events += self._parser.end()
        return [delta for event in events if (delta := self._delta(event))]

    def finish_reason(self, reason: str) -> str:
        """Returns the reason why the answer ended, which is "tool_calls" if it has any."""
        return "tool_calls" if reason == "stop" and self._complete else reason

    def message(self) -> Delta:
        """Returns the whole answer."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = list(self._calls.values())
        message: Delta = {"role": "assistant", "content": content, "refusal": None}
        if not content and (calls or reasoning):
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, event: AnswerEvent) -> Delta | None:
        match event:
            case ContentPiece(text):
                self._content.append(text)
                return {"content": text}
            case ReasoningPiece(text) if self._has_reasoning:
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"id": call_id, "type": "function", "function": function}
                self._calls[index] = {**call, "function": dict(function)}
                return {"tool_calls": [{"index": index, **call}]}
            case ArgumentsPiece(index, text):
                self._calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallComplete():
                self._complete = True
            case CallBroken(index, written):
                del self._calls[index]
                self._content.append(written)
        return None
