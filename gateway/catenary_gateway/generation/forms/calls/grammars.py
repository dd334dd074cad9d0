"""Grammars that force calls of tools, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from catenary_gateway.generation.forms.tool_use import ToolDefinition, ToolUse
from catenary_services.errors import InvalidInput

MOST_CALLS = 32
"""Most calls of one answer that is held to a grammar, so that it ends."""
_CONTENT = "content"
_TEXT = r"/(.|\n)*/"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space between JSON values. Small models would write it until their answer is full."""


class ToolGrammar:
    """The rules of a grammar for one request; a form of calls puts them together."""

    def __init__(self, use: ToolUse, special_tokens: Mapping[str, int], content: str = "") -> None:
        """Begins a grammar.

        Args:
            use: The tools of the request.
            special_tokens: Ids of the tokenizer's special tokens, which have no bytes and so are
                named by their ids.
            content: Grammar of answers that are no call; empty if they may be any text.
        """
        self.use = use
        self._special_tokens = special_tokens
        self._content = content
        self._rules: dict[str, str] = {}

    def text(self, answer: str) -> str:
        """Returns the whole grammar, for the rule of an answer."""
        rules = {"start": answer, **self._rules}
        lark = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        if self._content and not self.use.required:
            return with_part(lark, _CONTENT, self._content)
        # In this form no text of a schema is taken for the sign of another syntax.
        return json.dumps({"grammars": [{"lark_grammar": lark}]})

    def mark(self, text: str) -> str:
        """Returns what stands for a text that may be a special token."""
        return token_or_literal(text, self._special_tokens)

    def objects(self, arguments_key: str) -> str:
        """Returns a rule for a call as JSON object, whose name comes first."""
        calls = [
            f"{literal(_head(tool, arguments_key))} {self.arguments(at)} {literal('}')}"
            for at, tool in enumerate(self.use.callable)
        ]
        self._rules["call"] = " | ".join(calls)
        return "call"

    def arguments(self, at: int) -> str:
        """Returns a rule for the arguments of one of the tools that may be called."""
        tool, name = self.use.callable[at], f"arguments_{at}"
        self._rules[name] = f"%json {json.dumps(_schema_of(tool))}"
        return name

    def marked(self, mark: str, calls: str) -> str:
        """Returns the rule of answers whose calls have a mark in front.

        Args:
            mark: The mark of the first call.
            calls: What follows it.
        """
        if self.use.required:
            return f"{self.mark(mark)} {calls}"
        if self._content:
            return f"@{_CONTENT} | {self.mark(mark)} {calls}"
        name, rule = text_until(mark, self._special_tokens)
        self._rules |= {name: rule, "TEXT": _TEXT}
        return f"TEXT | text_until {calls}"

    def repeated(self, again: str) -> str:
        """Returns what stands for further calls."""
        return f"({again}){{0,{MOST_CALLS - 1}}}" if self.use.parallel else ""

    def unmarked(self, calls: str, begins: str) -> str:
        """Returns the rule of answers whose calls have no mark.

        Args:
            calls: The calls.
            begins: Characters with which calls, and therefore no text, may begin.

        Raises:
            InvalidInput: The content is to match a grammar, too: both might begin with a brace.
        """
        if self.use.required:
            return calls
        if self._content:
            text = (
                "cannot be kept where this model may call tools; use tool_choice none or required"
            )
            raise InvalidInput("response_format", text)
        self._rules["OTHER"] = rf"/\s*[^{re.escape(begins)}\s](.|\n)*/"
        return f"OTHER | {calls}"


def with_part(lark: str, name: str, grammar: str) -> str:
    """Returns a grammar in Lark together with another one that it refers to as `@name`.

    Both forms of llguidance's grammars may be that other one, Lark and JSON.

    Raises:
        InvalidInput: The other one is EBNF, which is translated later and only as a whole.
    """
    if not grammar.lstrip().startswith("{") and "::=" in grammar:
        text = "must be Lark where a model thinks first or may call tools"
        raise InvalidInput("guided_grammar", text)
    parts: list[dict[str, Any]] = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        parts = json.loads(grammar)["grammars"]
    named = {**parts[0], "name": name}
    return json.dumps({"grammars": [{"lark_grammar": lark}, named, *parts[1:]]})


def literal(text: str) -> str:
    """Returns a text as grammars have it."""
    return json.dumps(text)


def token_or_literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Returns what stands for a text: the special token of this text, or its bytes."""
    token = special_tokens.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def text_until(mark: str, special_tokens: Mapping[str, int]) -> tuple[str, str]:
    """Returns the rule `text_until`, any text up to a mark and the mark itself.

    It is a name, perhaps with options, and what it stands for.
    """
    token = special_tokens.get(mark)
    if token is not None:
        return "text_until", f"{_TEXT} <[{token}]>"
    escaped = re.escape(mark).replace("/", r"\/")
    return "text_until[lazy]", rf"/(.|\n)*{escaped}/"


def _head(tool: ToolDefinition, arguments_key: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": '


def _schema_of(tool: ToolDefinition) -> dict[str, Any]:
    # What only a strict tool insists on: keywords that no grammar has are ignored for others.
    return {**tool.schema, "x-guidance": {**_SPACING, "lenient": not tool.strict}}
