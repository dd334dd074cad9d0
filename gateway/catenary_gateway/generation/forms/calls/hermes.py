"""Calls as Hermes and Qwen write them: each a JSON object between two tags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from catenary_gateway.generation.forms.calls.call_parser import CallParser, Reading
from catenary_gateway.generation.forms.calls.grammars import ToolGrammar, literal
from catenary_gateway.generation.forms.calls.tool_form import ToolForm

_BEGIN = "<tool_call>"
_END = "</tool_call>"


class HermesForm(ToolForm):
    """`<tool_call>{"name": .., "arguments": ..}</tool_call>`, once for each call."""

    marks = (_BEGIN, _END)

    def parser(self, names: Collection[str], new_id: Callable[[], str]) -> CallParser:
        """Returns a reader of one answer."""
        return HermesParser(names, new_id)

    def rule(self, grammar: ToolGrammar) -> str:
        """Returns the rule for answers, and adds the rules that it needs to the grammar."""
        line = literal("\n")
        call = f"{line} {grammar.objects(self.arguments_key)} {line} {grammar.mark(_END)}"
        more = grammar.repeated(f"{line} {grammar.mark(_BEGIN)} {call}")
        return grammar.marked(_BEGIN, f"{call} {more}")

    def written(self, calls: Sequence[str]) -> str:
        """Returns calls that are JSON objects as the model would have written them."""
        return "\n".join(f"{_BEGIN}\n{call}\n{_END}" for call in calls)


class HermesParser(CallParser):
    """Reader of answers with `<tool_call>` tags, the last of which may be missing."""

    def _read_next(self) -> Reading[None]:
        if self._char != "<":
            yield from self._content()
            return
        called = False
        if (yield from self._literal(_BEGIN)):
            yield from self._space()
            while self._char == "{":
                if not (yield from self._object()):
                    return
                called = True
                yield from self._space()
            if (yield from self._literal(_END)) and called:
                self._taken.clear()
        self._release()
