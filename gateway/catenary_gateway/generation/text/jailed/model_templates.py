"""The chat templates of a model: the one for conversations, and perhaps another one for tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from catenary_gateway.generation.forms.calls.hermes import HermesForm
from catenary_gateway.generation.forms.calls.tool_form import ToolForm
from catenary_gateway.generation.forms.conversations import (
    Message,
    with_own_ids,
    written_out,
)
from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_gateway.generation.text.jailed.chat_template import ChatTemplate
from catenary_services.bounded_files import LARGEST_TEMPLATE_BYTES

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that `transformers` passes to templates."""


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """The chat templates of one model."""

    chat: ChatTemplate
    tools: ChatTemplate
    """The template of conversations with tools; it is the same where a model has only one."""

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[ToolDefinition],
        form: ToolForm | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns a conversation as the text that the model continues.

        Args:
            messages: The conversation; arguments of its calls are objects.
            variables: Further JSON values for the template.
            tools: The tools that the model is told of.
            form: The form of its calls; None if it calls no tools.
            add_generation_prompt: False to leave out what stands before an answer.

        Raises:
            InvalidInput: The template refuses the conversation.
        """
        documents: Sequence[Mapping[str, object]] = ()
        template = self.tools
        if not tools and not _has_calls(messages):
            template = self.chat
        elif not self.tools.shows_tools:
            messages = written_out(messages, tools, form or HermesForm())
        else:
            messages = with_own_ids(messages, form or HermesForm())
            documents = [tool.document for tool in tools]
        return template.render(
            messages, variables, documents, add_generation_prompt=add_generation_prompt
        )


def templates_in(file: bytes | None, config: Mapping[str, Any]) -> ModelTemplates | None:
    """Returns the templates in a model's files; None if there are none.

    Args:
        file: The content of chat_template.jinja; None if there is none.
        config: The document in tokenizer_config.json.

    Raises:
        ValueError: A template is malformed.
    """
    sources = _sources_in(file, config)
    special_tokens = _special_tokens(config)
    try:
        compiled = {name: ChatTemplate(each, special_tokens) for name, each in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error}") from None
    chat = compiled.get("default")
    return None if chat is None else ModelTemplates(chat, compiled.get("tool_use", chat))


def _sources_in(file: bytes | None, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sources of templates by name: "default", and "tool_use" if there is one."""
    if file is not None:
        return {"default": file.decode()}
    source = config.get("chat_template")
    if source is None:
        return {}
    named = source if isinstance(source, list) else [{"name": "default", "template": source}]
    try:
        sources = {str(each["name"]): each["template"] for each in named}
    except (KeyError, TypeError):
        raise ValueError("tokenizer_config.json: chat_template has no names") from None
    if not all(isinstance(each, str) for each in sources.values()):
        raise ValueError("tokenizer_config.json: chat_template is not a text")
    if max(map(len, sources.values()), default=0) > LARGEST_TEMPLATE_BYTES:
        raise ValueError("tokenizer_config.json: chat_template is too long")
    return {name: sources[name] for name in ("default", "tool_use") if name in sources}


def _has_calls(messages: Sequence[Message]) -> bool:
    """Returns True if a conversation has calls, or results of calls."""
    return any(each.get("tool_calls") or each["role"] == "tool" for each in messages)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
