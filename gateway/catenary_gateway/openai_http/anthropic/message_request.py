"""The body of a request to `/v1/messages`, as the chat completion that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from catenary_gateway.generation.text.chat_template import Message
from catenary_gateway.openai_http.calls.bodies import ModelName, refuse, typed
from catenary_gateway.openai_http.completion_request import CompletionRequest, Fields, chat_of
from catenary_services.errors import InvalidInput

FIELD_NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
"""The names of fields here, by those in a chat completion."""
_REFUSED = {
    "container": ((), "is not offered"),
    "context_management": (({},), "is not offered: nothing of a conversation is left out"),
    "mcp_servers": (([],), "is not offered: no tool can be called"),
    "output_config": (({},), "is not offered"),
    "output_format": ((), "is not offered beyond plain text"),
    "thinking": (({"type": "disabled"},), "is not offered"),
    "tool_choice": (({"type": "auto"}, {"type": "none"}), "is not offered: no tool can be called"),
    "tools": (([],), "is not offered: no tool can be called"),
}
"""What would change the answer and is not offered, with the values that change nothing."""
Block = dict[str, Any]


class MessageTurn(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


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


class MessageBody(ConversationBody, kw_only=True):
    """The body of a request for a message."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(description="0 is greedy.")] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    metadata: Annotated[dict[str, Any], msgspec.Meta(description="Ignored.")] = {}


def message_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a body.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered; a value out of its
            range has the field's name in chats.
    """
    refuse(fields, _REFUSED)
    body = typed(fields, MessageBody)
    chat = {
        "model": body.model,
        "messages": _conversation(body),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    return chat_of(chat)


def conversation_of(fields: Fields) -> CompletionRequest:
    """Returns the prompt in the fields of a body, of which tokens are only counted.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, _REFUSED)
    body = typed(fields, ConversationBody)
    return chat_of({"model": body.model, "messages": _conversation(body)})


def _conversation(body: ConversationBody) -> list[Message]:
    """Returns the messages of a chat, in which users and assistants take turns."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _text(body.system, "system")})
    for at, turn in enumerate(body.messages):
        text = _text(turn.content, f"messages[{at}].content")
        if found and found[-1]["role"] == turn.role:
            # Messages of one role in a row are one turn, as Anthropic has it.
            found[-1]["content"] += "\n" + text
        else:
            found.append({"role": turn.role, "content": text})
    if body.messages[-1].role != "user":
        last = f"messages[{len(body.messages) - 1}].role"
        raise InvalidInput(last, "must be user: the beginning of an answer cannot be given")
    return list(found)


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{at}]") for at, block in enumerate(content))


def _block_text(block: Block, where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        shown = kind[:40] if isinstance(kind, str) else "?"
        raise InvalidInput(f"{where}.type", f"{shown!r} is not offered: only text is read")
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidInput(f"{where}.text", "must be a text")
    return text
