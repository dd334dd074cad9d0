"""The forms in which one model writes calls and reasoning, as its settings or template say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from catenary_gateway.generation.forms.calls.hermes import HermesForm
from catenary_gateway.generation.forms.calls.llama import LlamaForm
from catenary_gateway.generation.forms.calls.mistral import ARGUMENTS_MARK, MistralForm
from catenary_gateway.generation.forms.calls.plain_json import PlainJsonForm
from catenary_gateway.generation.forms.calls.tool_form import ToolForm
from catenary_gateway.generation.forms.reasoning import ReasoningForm
from catenary_services.domain.model import RECOGNISED

_NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelForms:
    """The forms of what a model writes in its answers beside text."""

    tools: ToolForm | None = None
    """The form of its calls; None if it calls no tools."""
    reasoning: ReasoningForm | None = None
    """The form of its reasoning; None if it has none."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokenizer's special tokens, which are left out of texts."""


def forms_of(
    template: str,
    special_tokens: Mapping[str, int],
    *,
    shows_tools: bool,
    tool_parser: str = RECOGNISED,
    reasoning_parser: str = RECOGNISED,
) -> ModelForms:
    """Returns the forms of a model.

    Args:
        template: Source of its chat template.
        special_tokens: Ids of the tokenizer's special tokens.
        shows_tools: True if the template shows tools to the model itself.
        tool_parser: Name of the form of its calls, or `RECOGNISED`.
        reasoning_parser: Name of the form of its reasoning, or `RECOGNISED`.
    """
    if tool_parser == RECOGNISED:
        tool_parser = tool_parser_in(template) if shows_tools else "hermes"
    if reasoning_parser == RECOGNISED:
        reasoning_parser = reasoning_parser_in(template)
    later = ARGUMENTS_MARK in template
    tools: dict[str, ToolForm | None] = {
        "hermes": HermesForm(),
        "llama3_json": LlamaForm(),
        "mistral": MistralForm(later=later),
        "json": PlainJsonForm(),
        _NONE: None,
    }
    reasoning: dict[str, ReasoningForm | None] = {
        "qwen3": ReasoningForm(assumed=False),
        "deepseek_r1": ReasoningForm(assumed=True),
        _NONE: None,
    }
    return ModelForms(tools[tool_parser], reasoning[reasoning_parser], special_tokens)


def tool_parser_in(template: str) -> str:
    """Returns the name of the form of calls that a chat template shows its model."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or (
        "<|start_header_id|>" in template and '"parameters"' in template
    ):
        return "llama3_json"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    return "json"


def reasoning_parser_in(template: str) -> str:
    """Returns the name of the form of reasoning that a chat template takes out of history."""
    if "</think>" not in template:
        return _NONE
    # The templates of DeepSeek's first models never show the tag with which these begin.
    return "qwen3" if "<think>" in template else "deepseek_r1"
