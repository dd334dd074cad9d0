"""The body of a request to `/v1/responses`, as the chat completion that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from catenary_gateway.generation.intake import MOST_MESSAGES
from catenary_gateway.generation.text.chat_template import Message
from catenary_gateway.openai_http.calls.bodies import (
    ModelName,
    SamplingBody,
    UserName,
    refuse,
    sampling_of,
    typed,
)
from catenary_gateway.openai_http.completion_request import CompletionRequest, Fields, chat_of
from catenary_services.errors import InvalidInput

FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""The names of fields here, by those in a chat completion."""
_MOST_METADATA = 16
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_NO_TOOLS = "is not offered: no tool can be called"
_REFUSED = {
    "background": ((False,), "is not offered: a response is made while its client waits"),
    "conversation": ((), "is not offered: continue by previous_response_id"),
    "context_management": (([], {}), "is not offered"),
    "include": (([],), "is not offered: a response has nothing more to include"),
    "moderation": (({},), "is not offered"),
    "prompt": ((), "is not offered: templates of prompts are not kept here"),
    "reasoning": (({},), "is not offered"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("auto", "none"), _NO_TOOLS),
    "top_logprobs": ((0,), "is not offered"),
    "truncation": (("disabled",), "is not offered: nothing of a conversation is left out"),
    "text": (({}, {"format": {"type": "text"}}), "is not offered beyond plain text"),
}
"""What would change the answer and is not offered, with the values that change nothing."""
Item = dict[str, Any]


class ResponseBody(SamplingBody, kw_only=True):
    """The body of a request for a response."""

    model: ModelName
    input: Annotated[
        str | list[Item],
        msgspec.Meta(description="A text, or messages with `role` and `content`."),
    ]
    instructions: Annotated[
        str, msgspec.Meta(description="The system message; responses that follow do not have it.")
    ] = ""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: Annotated[str | list[str], msgspec.Meta(description="Texts that end an answer.")] = ""
    previous_response_id: Annotated[
        str | None, msgspec.Meta(description="A response of this key, which this one continues.")
    ] = None
    store: Annotated[bool, msgspec.Meta(description="False to keep nothing of the response.")] = (
        True
    )
    stream: bool = False
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=_MOST_METADATA)] = msgspec.field(
        default_factory=dict
    )
    truncation: Literal["disabled"] = "disabled"
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
            InvalidInput: A field is out of its range; the error has the field's name in chats.
        """
        body = self.body
        first = [{"role": "system", "content": body.instructions}] if body.instructions else []
        chat: dict[str, Any] = sampling_of(self.fields)
        chat["model"] = body.model
        chat["messages"] = [*first, *conversation]
        chat["max_completion_tokens"] = body.max_output_tokens
        chat["stop"] = body.stop or None
        chat["stream"] = body.stream
        return chat_of(chat)


def response_of(fields: Fields) -> ResponseRequest:
    """Returns the request in the fields of a body.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, _REFUSED)
    body = typed(fields, ResponseBody)
    if isinstance(body.input, str):
        if not body.input:
            raise InvalidInput("input", "must not be empty")
        return ResponseRequest(body, ({"role": "user", "content": body.input},), fields)
    if not body.input:
        raise InvalidInput("input", "must not be empty")
    messages = tuple(_message(item, f"input[{at}]") for at, item in enumerate(body.input))
    return ResponseRequest(body, messages, fields)


def _message(item: Item, where: str) -> Message:
    """Returns an item of the input as a message of a chat."""
    kind = item.get("type", "message")
    if kind != "message":
        shown = kind[:40] if isinstance(kind, str) else "?"
        raise InvalidInput(f"{where}.type", f"{shown!r} is not offered: only messages are read")
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidInput(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidInput(where, "must be a text or a list of parts")
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        shown = kind[:40] if isinstance(kind, str) else "?"
        raise InvalidInput(f"{where}.type", f"{shown!r} is not offered: only text is read")
    assert isinstance(part, dict)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidInput(f"{where}.text", "must be a text")
    return {"type": "text", "text": text}
