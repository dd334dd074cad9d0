"""The input of a response as messages of a chat, and its tools as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catenary_gateway.generation.forms.conversations import Message
from catenary_services.errors import InvalidInput

Item = dict[str, Any]
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


def messages_of_items(items: Sequence[Item]) -> list[Message]:
    """Returns the items of an input as messages of a chat.

    Raises:
        InvalidInput: An item is wrong, or of a kind that is not offered.
    """
    found: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message")
        if kind == "message":
            found.append(_message(item, where))
        elif kind == "function_call":
            _add_call(found, item)
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            call_id = item.get("call_id")
            found.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":  # what was thought before earlier answers is not read again
            shown = kind[:40] if isinstance(kind, str) else "?"
            raise InvalidInput(f"{where}.type", f"{shown!r} is not offered")
    return list(found)


def chat_tools(tools: Sequence[Item]) -> list[Item]:
    """Returns tools in the form that chats have; those that are no functions as they are."""
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def chat_tool_choice(choice: str | Item) -> Any:
    """Returns the choice of a tool in the form that chats have."""
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        listed = tools if isinstance(tools, list) else []
        named = [chat_tool_choice(each) if isinstance(each, dict) else each for each in listed]
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def chat_format(text: Item) -> Item | None:
    """Returns the form of the answer as chats have it; None if it is free.

    Raises:
        InvalidInput: It is no object.
    """
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidInput("text.format", "must be an object")
    if form.get("type") != "json_schema":
        return form
    described = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidInput(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _add_call(messages: list[Item], item: Item) -> None:
    """Adds a call to the answer that it is part of, together with other calls."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: object, where: str) -> str | list[Item]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidInput(where, "must be a text or a list of parts")
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part(part: object, where: str) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        shown = kind[:40] if isinstance(kind, str) else "?"
        raise InvalidInput(f"{where}.type", f"{shown!r} is not offered: only text is read")
    assert isinstance(part, dict)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidInput(f"{where}.text", "must be a text")
    return {"type": "text", "text": text}
