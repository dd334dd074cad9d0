"""Calls as Mistral's models write them, in the earlier form and in the later one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from catenary_gateway.generation.forms.calls.call_parser import CallParser, Reading
from catenary_gateway.generation.forms.calls.grammars import ToolGrammar, literal
from catenary_gateway.generation.forms.calls.tool_form import ToolForm

_BEGIN = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
ARGUMENTS_MARK = "[ARGS]"
"""The mark that only the later form has."""


class MistralForm(ToolForm):
    """`[TOOL_CALLS]` before a list of JSON objects, or before each `name[ARGS]{..}`."""

    marks = (_BEGIN, _ID, ARGUMENTS_MARK)
    id_prefix = ""
    id_characters = 9

    def __init__(self, *, later: bool) -> None:
        """Creates the form that a model writes; both are read.

        Args:
            later: True for `name[ARGS]{..}`.
        """
        self._later = later

    def parser(self, names: Collection[str], new_id: Callable[[], str]) -> CallParser:
        """Returns a reader of one answer."""
        return MistralParser(names, new_id)

    def rule(self, grammar: ToolGrammar) -> str:
        """Returns the rule for answers, and adds the rules that it needs to the grammar."""
        if self._later:
            mark = grammar.mark(ARGUMENTS_MARK)
            calls = [
                f"{literal(tool.name)} {mark} {grammar.arguments(at)}"
                for at, tool in enumerate(grammar.use.callable)
            ]
            call = f"({' | '.join(calls)})"
            more = grammar.repeated(f"{grammar.mark(_BEGIN)} {call}")
            return grammar.marked(_BEGIN, f"{call} {more}")
        call = grammar.objects(self.arguments_key)
        more = grammar.repeated(f"{literal(', ')} {call}")
        listed = f"{literal(' ')}? {literal('[')} {call} {more} {literal(']')}"
        return grammar.marked(_BEGIN, listed)

    def written(self, calls: Sequence[str]) -> str:
        """Returns calls that are JSON objects as the model would have written them."""
        return f"{_BEGIN}[{', '.join(calls)}]"

    def own_id(self, call_id: str) -> str:
        """Returns what stands for the id of a call that another model may have made.

        The templates refuse all but nine letters and digits.
        """
        if len(call_id) == self.id_characters and call_id.isalnum():
            return call_id
        digest = hashlib.sha256(call_id.encode(errors="replace")).hexdigest()
        return digest[: self.id_characters]


class MistralParser(CallParser):
    """Reader of answers with `[TOOL_CALLS]`, in both forms."""

    def _read_next(self) -> Reading[None]:
        if self._char != "[":
            yield from self._content()
            return
        if not (yield from self._literal(_BEGIN)):
            self._release()
            return
        yield from self._space()
        if self._char == "[":
            yield from self._list()
        elif self._char == "{":
            yield from self._object()
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        """Reads a name with its arguments, between which there may be an id and a mark."""
        name = yield from self._word()
        yield from self._space()
        if self._char == "[":
            mark = yield from self._mark()
            if mark == _ID:
                yield from self._word()
                mark = yield from self._mark()
            if mark != ARGUMENTS_MARK:
                self._release()
                return
            yield from self._space()
        if name in self._names and self._char == "{":
            yield from self._arguments(name)
        else:
            self._release()

    def _word(self) -> Reading[str]:
        word = ""
        while self._char.isalnum() or (self._char and self._char in "_-."):
            word += self._char
            yield from self._take()
        return word

    def _mark(self) -> Reading[str]:
        """Takes a mark in brackets, as far as it may be one."""
        mark = ""
        while self._char and any(
            each.startswith(mark + self._char) for each in (_ID, ARGUMENTS_MARK)
        ):
            mark += self._char
            yield from self._take()
        return mark
