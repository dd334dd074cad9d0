"""Calls as Llama 3 writes them: JSON objects with "parameters", sometimes behind a token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from catenary_gateway.generation.forms.calls.call_parser import CallParser, Reading
from catenary_gateway.generation.forms.calls.grammars import ToolGrammar, literal
from catenary_gateway.generation.forms.calls.tool_form import ToolForm

_MARK = "<|python_tag|>"
_SEPARATOR = "; "


class LlamaForm(ToolForm):
    """`{"name": .., "parameters": ..}`; further calls follow after a semicolon."""

    marks = (_MARK,)
    arguments_key = "parameters"

    def parser(self, names: Collection[str], new_id: Callable[[], str]) -> CallParser:
        """Returns a reader of one answer."""
        return LlamaParser(names, new_id)

    def rule(self, grammar: ToolGrammar) -> str:
        """Returns the rule for answers, and adds the rules that it needs to the grammar."""
        call = grammar.objects(self.arguments_key)
        more = grammar.repeated(f"{literal(_SEPARATOR)} {call}")
        mark = "" if grammar.use.required else f"{grammar.mark(_MARK)}?"
        return grammar.unmarked(f"{mark} {call} {more}", "{<")

    def written(self, calls: Sequence[str]) -> str:
        """Returns calls that are JSON objects as the model would have written them."""
        return _SEPARATOR.join(calls)


class LlamaParser(CallParser):
    """Reader of answers with calls that are JSON objects anywhere in the text."""

    def _read_next(self) -> Reading[None]:
        if self._char == "<":
            if not (yield from self._literal(_MARK)):
                self._release()
                return
            yield from self._space()
        if self._char != "{":
            if self._char:
                yield from self._content()
            return
        if (yield from self._object()):
            yield from self._space()
            if self._char and self._char in ";,":
                yield from self._take()
                yield from self._space()
            if self._char and self._char in "{<":
                self._taken.clear()
            self._release()
