"""The syntax of one answer: what is forced, what is shown, and how it is read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from catenary_gateway.generation.forms.calls.grammars import ToolGrammar
from catenary_gateway.generation.forms.events import AnswerParser, ContentParser
from catenary_gateway.generation.forms.model_forms import ModelForms
from catenary_gateway.generation.forms.reasoning import (
    ReasoningParser,
    ThinkingState,
    behind_reasoning,
)
from catenary_gateway.generation.forms.tool_use import ToolUse
from catenary_services.domain.sampling import MAX_GRAMMAR_BYTES
from catenary_services.errors import InvalidInput

_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The syntax of one answer, which may have reasoning and calls beside content."""

    model: ModelForms = field(default_factory=ModelForms)
    tools: ToolUse | None = None
    """The tools that may be called; None if there are none."""
    begin: ThinkingState = ThinkingState.ANSWERING

    @classmethod
    def of(cls, model: ModelForms, tools: ToolUse | None, prompt: str) -> AnswerSyntax:
        """Returns the syntax of a model's answer to a prompt."""
        if model.reasoning is None:
            return cls(model, tools)
        return cls(model, tools, model.reasoning.begin(prompt))

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that must be in the text, because they mark calls or reasoning."""
        marks: tuple[str, ...] = ()
        if self.tools is not None and self.model.tools is not None:
            marks += self.model.tools.marks
        if self.model.reasoning is not None:
            marks += self.model.reasoning.marks
        special = self.model.special_tokens
        return frozenset(special[mark] for mark in marks if mark in special)

    @property
    def forces_calls(self) -> bool:
        """True if a grammar is made of the tools' schemas."""
        return self.tools is not None and self.tools.constrained

    def grammar(self, content: str) -> str:
        """Returns the grammar of the whole answer.

        Args:
            content: The grammar of its content; empty if it may be anything.

        Raises:
            InvalidInput: The grammar is too long, or content and calls cannot be told apart.
        """
        grammar, special, form = content, self.model.special_tokens, self.model.tools
        tools = self.tools
        if tools is not None and form is not None and (tools.constrained or content):
            rules = ToolGrammar(tools, special, content)
            grammar = rules.text(form.rule(rules))
        if grammar and self.model.reasoning is not None:
            grammar = behind_reasoning(grammar, self.begin, special)
        size = len(grammar.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            field_name = "response_format" if self.tools is None else "tools"
            text = f"makes a grammar of {size} bytes, at most {MAX_GRAMMAR_BYTES} can be forced"
            raise InvalidInput(field_name, text)
        return grammar

    def parser(self) -> AnswerParser:
        """Returns a new reader of the answer."""
        parser: AnswerParser = ContentParser()
        form = self.model.tools
        if self.tools is not None and form is not None:
            names = [tool.name for tool in self.tools.callable]
            parser = form.parser(names, lambda: form.new_id(_random))
        if self.model.reasoning is not None:
            parser = ReasoningParser(self.begin, parser)
        return parser
