"""The body of a request to `/v1/responses`, as the chat completion that it asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.intake import MOST_MESSAGES
from catenary_gateway.openai_http.calls.bodies import (
    ModelName,
    SamplingBody,
    UserName,
    sampling_of,
    typed,
)
from catenary_gateway.openai_http.completion_request import CompletionRequest, chat_of
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse
from catenary_gateway.openai_http.responses.response_input import (
    Item,
    chat_format,
    chat_tool_choice,
    chat_tools,
    messages_of_items,
)
from catenary_services.errors import InvalidInput

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_PARTS = re.compile(r"(tools\[\d+\]|tool_choice)\.function")
_MOST_METADATA = 16


def name_of_field(name: str) -> str:
    """Returns the name that a field of a chat completion has in the body of a response."""
    head, dot, rest = name.partition(".")
    if head in _NAMES:
        return _NAMES[head] + dot + rest
    if name.startswith("messages"):
        return "input"
    return _PARTS.sub(r"\1", name)


class ResponseBody(SamplingBody, kw_only=True):
    """The body of a request for a response."""

    model: ModelName
    input: Annotated[
        str | list[Item],
        msgspec.Meta(description="A text, or messages, calls of functions and their outputs."),
    ]
    instructions: Annotated[
        str, msgspec.Meta(description="The system message; responses that follow do not have it.")
    ] = ""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: Annotated[str | list[str], msgspec.Meta(description="Texts that end an answer.")] = ""
    tools: Annotated[list[Item], msgspec.Meta(description="Functions that it may call.")] = (
        msgspec.field(default_factory=list)
    )
    tool_choice: Annotated[
        str | Item, msgspec.Meta(description="auto, none, required, a function, allowed_tools.")
    ] = "auto"
    parallel_tool_calls: bool = True
    text: Annotated[
        Item, msgspec.Meta(description="`format`: text, json_object or json_schema.")
    ] = msgspec.field(default_factory=dict)
    previous_response_id: Annotated[
        str | None, msgspec.Meta(description="A response of this key, which this one continues.")
    ] = None
    store: Annotated[bool, msgspec.Meta(description="False to keep nothing of it.")] = True
    stream: bool = False
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=_MOST_METADATA)] = msgspec.field(
        default_factory=dict
    )
    user: UserName = None


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request for a response that was checked, as far as its history is not needed for it."""

    body: ResponseBody
    messages: tuple[Message, ...]
    """The messages of `input`."""
    fields: Fields

    def conversation(self, history: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the conversation so far, with the new messages at its end.

        Raises:
            InvalidInput: It has too many messages.
        """
        messages = (*history, *self.messages)
        if len(messages) > MOST_MESSAGES:
            text = f"has {len(messages)} messages with those before; at most {MOST_MESSAGES} may be"
            raise InvalidInput("input", text)
        return messages

    def completion(self, conversation: Sequence[Message]) -> CompletionRequest:
        """Returns the chat completion that answers a conversation.

        Raises:
            InvalidInput: A field is wrong; the error has its name in chats (`name_of_field`).
        """
        body = self.body
        first = [{"role": "system", "content": body.instructions}] if body.instructions else []
        chat: dict[str, Any] = sampling_of(self.fields)
        chat["model"] = body.model
        chat["messages"] = [*first, *conversation]
        chat["max_completion_tokens"] = body.max_output_tokens
        chat["stop"] = body.stop or None
        chat["stream"] = body.stream
        chat["tools"] = chat_tools(body.tools)
        chat["tool_choice"] = chat_tool_choice(body.tool_choice)
        chat["parallel_tool_calls"] = body.parallel_tool_calls
        chat["response_format"] = chat_format(body.text)
        return chat_of(chat)


def response_of(fields: Fields) -> ResponseRequest:
    """Returns the request in the fields of a body.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, "responses")
    body = typed(fields, ResponseBody)
    if not body.input:
        raise InvalidInput("input", "must not be empty")
    if isinstance(body.input, str):
        return ResponseRequest(body, ({"role": "user", "content": body.input},), fields)
    messages = messages_of_items(body.input)
    if not messages:
        raise InvalidInput("input", "has no message")
    return ResponseRequest(body, tuple(messages), fields)
