"""Calls of models that have no form of their own: JSON, alone or in a fence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from catenary_gateway.generation.forms.calls.call_parser import CallParser, Reading
from catenary_gateway.generation.forms.calls.grammars import ToolGrammar, literal
from catenary_gateway.generation.forms.calls.tool_form import ToolForm

_FENCE = "```"
_LANGUAGE = "json"


class PlainJsonForm(ToolForm):
    """`{"name": .., "arguments": ..}`, or a list of such objects."""

    def parser(self, names: Collection[str], new_id: Callable[[], str]) -> CallParser:
        """Returns a reader of one answer."""
        return PlainJsonParser(names, new_id)

    def rule(self, grammar: ToolGrammar) -> str:
        """Returns the rule for answers, and adds the rules that it needs to the grammar."""
        call = grammar.objects(self.arguments_key)
        more = grammar.repeated(f"{literal(', ')} {call}")
        listed = f" | {literal('[')} {call} {more} {literal(']')}" if more else ""
        return grammar.unmarked(f"{call}{listed}", "{[")

    def written(self, calls: Sequence[str]) -> str:
        """Returns calls that are JSON objects as the model would have written them."""
        return calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]"


class PlainJsonParser(CallParser):
    """Reader of answers with calls anywhere: JSON objects, lists of them, both in fences, too."""

    def _read_next(self) -> Reading[None]:
        fenced = self._char == "`"
        if fenced:
            if not (yield from self._literal(_FENCE)):
                self._release()
                return
            yield from self._literal(_LANGUAGE)
            yield from self._space()
        if self._char == "[":
            called = yield from self._list()
        elif self._char == "{":
            called = yield from self._object()
        else:
            self._release()
            if self._char and not fenced:
                yield from self._content()
            return
        if called and fenced:
            yield from self._space()
            if (yield from self._literal(_FENCE)):
                self._taken.clear()
        self._release()
