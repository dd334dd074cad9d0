"""Reasoning of models that think between tags before they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from catenary_gateway.generation.forms.calls.grammars import text_until, token_or_literal, with_part
from catenary_gateway.generation.forms.events import AnswerEvent, AnswerParser, ReasoningPiece

_BEGIN = "<think>"
_END = "</think>"
_ANSWER = "answer"


class ThinkingState(Enum):
    """The progress of an answer with its reasoning."""

    UNDECIDED = auto()
    """Reasoning follows if the model writes its tag."""
    THINKING = auto()
    ANSWERING = auto()


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning between `<think>` and `</think>`, the first of which may be in the prompt."""

    assumed: bool
    """True if all models of this form think, even where neither prompt nor model has the first tag.
    """
    marks = (_BEGIN, _END)

    def begin(self, prompt: str) -> ThinkingState:
        """Returns how an answer to a prompt begins."""
        end = prompt.rstrip()
        if end.endswith(_END):
            return ThinkingState.ANSWERING
        if self.assumed or end.endswith(_BEGIN):
            return ThinkingState.THINKING
        return ThinkingState.UNDECIDED


class ReasoningParser:
    """Reader of an answer that may begin with reasoning.

    White space around the tags is nobody's.
    """

    def __init__(self, begin: ThinkingState, content: AnswerParser) -> None:
        """Begins an answer.

        Args:
            begin: How the answer begins.
            content: The reader of what follows the reasoning.
        """
        self._state = begin
        self._content = content
        self._held = ""
        """Text that may be part of a tag, or white space around one."""
        self._is_fresh = True
        """True until there is anything but white space behind the last tag."""

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Returns what has become certain with the next piece of the answer."""
        self._held += text
        events: list[AnswerEvent] = []
        if self._state is ThinkingState.UNDECIDED:
            self._decide()
        if self._state is ThinkingState.THINKING:
            events += self._think()
        if self._state is ThinkingState.ANSWERING:
            events += self._content.push(self._answer())
        return events

    def end(self) -> Sequence[AnswerEvent]:
        """Returns the rest, after the last piece."""
        rest, self._held = self._held, ""
        if self._state is ThinkingState.THINKING:
            reasoning = rest.strip() if self._is_fresh else rest.rstrip()
            return [*_pieces(reasoning), *self._content.end()]
        return [*self._content.push(rest), *self._content.end()]

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(_BEGIN):
            self._state = ThinkingState.THINKING
        elif not _BEGIN.startswith(begun):
            self._state, self._is_fresh = ThinkingState.ANSWERING, False

    def _think(self) -> Sequence[AnswerEvent]:
        thought, tag, rest = self._held.partition(_END)
        if self._is_fresh:
            thought = thought.lstrip()
            while thought.startswith(_BEGIN):
                # The model writes the tag itself, or repeats that of the prompt.
                thought = thought[len(_BEGIN) :].lstrip()
            if not tag and _BEGIN.startswith(thought):
                self._held = thought
                return []
        if tag:
            self._state, self._held, self._is_fresh = ThinkingState.ANSWERING, rest, True
            return _pieces(thought.rstrip())
        certain = thought[: len(thought) - _possible_begin(thought, _END)].rstrip()
        self._held = thought[len(certain) :]
        self._is_fresh = self._is_fresh and not certain
        return _pieces(certain)

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text


def behind_reasoning(grammar: str, begin: ThinkingState, special_tokens: Mapping[str, int]) -> str:
    """Returns the grammar of an answer whose part behind the reasoning matches `grammar`."""
    if begin is ThinkingState.ANSWERING:
        return grammar
    until, rule = text_until(_END, special_tokens)
    tag = token_or_literal(_BEGIN, special_tokens)
    # A model may repeat the tag that its prompt ends with.
    start = f"{tag}? thinking" if begin is ThinkingState.THINKING else f"({tag} thinking)?"
    rules = {
        "start": f"{start} @{_ANSWER}",
        "thinking": "text_until SPACE?",
        "SPACE": r"/\n{1,2}/",
        until: rule,
    }
    lark = "".join(f"{name}: {each}\n" for name, each in rules.items())
    return with_part(lark, _ANSWER, grammar)


def _pieces(text: str) -> Sequence[AnswerEvent]:
    return [ReasoningPiece(text)] if text else []


def _possible_begin(text: str, tag: str) -> int:
    """Returns the length of the longest end of a text with which a tag may begin."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)
