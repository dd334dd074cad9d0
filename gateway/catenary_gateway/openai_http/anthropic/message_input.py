"""The conversation and the tools of a message, as those of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from catenary_gateway.generation.forms.conversations import Message
from catenary_services.errors import InvalidInput

Block = dict[str, Any]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")


class MessageTurn(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


def chat_messages(system: str | list[Block], turns: Sequence[MessageTurn]) -> list[Message]:
    """Returns the messages of a chat, in which users and assistants take turns.

    Raises:
        InvalidInput: A message has what is not offered, or the last one is the assistant's.
    """
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _text(system, "system")})
    for at, turn in enumerate(turns):
        where = f"messages[{at}].content"
        if isinstance(turn.content, str):
            _add(found, {"role": turn.role, "content": turn.content})
        elif turn.role == "user":
            _add_asked(found, turn.content, where)
        else:
            _add_answered(found, turn.content, where)
    if turns[-1].role != "user":
        last = f"messages[{len(turns) - 1}].role"
        raise InvalidInput(last, "must be user: the beginning of an answer cannot be given")
    return list(found)


def chat_tools(tools: Sequence[Block]) -> list[Block]:
    """Returns tools in the form that chats have.

    Raises:
        InvalidInput: A tool is not the client's own.
    """
    found = []
    for at, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            raise InvalidInput(f"tools[{at}].type", "must be custom: no other tools are offered")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: Block) -> tuple[Any, bool]:
    """Returns the choice of a tool in the form that chats have, and whether calls may be several.

    Raises:
        InvalidInput: It is none that is offered.
    """
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use", False)
    if type(single) is not bool:
        raise InvalidInput("tool_choice.disable_parallel_tool_use", "must be true or false")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, not single
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidInput("tool_choice.type", f"must be tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind], not single


def _add(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Adds a message; messages of one role in a row are one turn, as Anthropic has it."""
    role = message["role"]
    if not found or found[-1]["role"] != role or role == "tool":
        found.append(message)
        return
    texts = [text for text in (found[-1]["content"], message["content"]) if text]
    found[-1]["content"] = "\n".join(texts)
    if "tool_calls" in message:
        found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])


def _add_asked(found: list[dict[str, Any]], blocks: list[Block], where: str) -> None:
    texts = []
    for at, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, f"{where}[{at}]"))
            continue
        content = block.get("content") or ""
        if not isinstance(content, str | list):
            raise InvalidInput(f"{where}[{at}].content", "must be a text or a list of blocks")
        text = _text(content, f"{where}[{at}].content")
        call_id = block.get("tool_use_id")
        _add(found, {"role": "tool", "tool_call_id": call_id, "content": text})
    if texts:
        _add(found, {"role": "user", "content": "\n".join(texts)})


def _add_answered(found: list[dict[str, Any]], blocks: list[Block], where: str) -> None:
    texts, calls = [], []
    for at, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in _THOUGHTS:  # what was thought before is not read again
            texts.append(_block_text(block, f"{where}[{at}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    _add(found, message | {"tool_calls": calls} if calls else message)


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{at}]") for at, block in enumerate(content))


def _block_text(block: object, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        shown = kind[:40] if isinstance(kind, str) else "?"
        raise InvalidInput(f"{where}.type", f"{shown!r} is not offered here")
    assert isinstance(block, dict)
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidInput(f"{where}.text", "must be a text")
    return text
