"""The body of a request to `/v1/messages`, as the chat completion that it asks for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from catenary_gateway.openai_http.anthropic.message_input import (
    Block,
    MessageTurn,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from catenary_gateway.openai_http.calls.bodies import ModelName, typed
from catenary_gateway.openai_http.calls.prompt_calls import fields_called
from catenary_gateway.openai_http.completion_request import CompletionRequest, chat_of
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse

_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
}
_FUNCTION = re.compile(r"(tools\[\d+\]|tool_choice)\.function")


def name_of_field(name: str) -> str:
    """Returns the name that a field of a chat completion has in the body of a message."""
    if name in _NAMES:
        return _NAMES[name]
    return _FUNCTION.sub(r"\1", name).replace("].parameters", "].input_schema")


class ConversationBody(msgspec.Struct, kw_only=True):
    """The fields that make up a prompt."""

    model: ModelName
    messages: Annotated[
        list[MessageTurn],
        msgspec.Meta(min_length=1, description="By turns; the last one is the user's."),
    ]
    system: Annotated[
        str | list[Block], msgspec.Meta(description="The system message: a text, or text blocks.")
    ] = ""
    tools: Annotated[list[Block], msgspec.Meta(description="Tools that it may call.")] = (
        msgspec.field(default_factory=list)
    )
    tool_choice: Annotated[
        Block, msgspec.Meta(description="`type`: auto, any, none, or tool with its `name`.")
    ] = msgspec.field(default_factory=lambda: {"type": "auto"})


class OutputFormat(msgspec.Struct):
    """The form that an answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The fields of a message that hold for the whole answer."""

    format: OutputFormat | None = None
    effort: Annotated[str | None, msgspec.Meta(description="Ignored.")] = None


class MessageBody(ConversationBody, kw_only=True):
    """The body of a request for a message."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(description="0 is greedy.")] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)
    metadata: Annotated[dict[str, Any], msgspec.Meta(description="Ignored.")] = msgspec.field(
        default_factory=dict
    )


def message_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a body.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, "messages")
    body = typed(fields, MessageBody)
    chat = _conversation(body) | {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    form = body.output_config.format
    if form is not None:
        described = {"name": "answer", "schema": form.schema}
        chat["response_format"] = {"type": form.type, "json_schema": described}
    return _checked(chat)


def conversation_of(fields: Fields) -> CompletionRequest:
    """Returns the prompt in the fields of a body, of which tokens are only counted.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, "messages")
    return _checked(_conversation(typed(fields, ConversationBody)))


def _checked(chat: Fields) -> CompletionRequest:
    # Messages of a chat are not one for one those of the body, so the error cannot say which it is.
    with fields_called(lambda n: "messages" if n.startswith("messages[") else name_of_field(n)):
        return chat_of(chat)


def _conversation(body: ConversationBody) -> dict[str, Any]:
    choice, parallel = chat_tool_choice(body.tool_choice)
    return {
        "model": body.model,
        "messages": chat_messages(body.system, body.messages),
        "tools": chat_tools(body.tools),
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }
