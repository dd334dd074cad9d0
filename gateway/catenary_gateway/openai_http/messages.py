"""The messages of a chat, checked field by field and in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from catenary_gateway.openai_http.tool_fields import function_name
from catenary_gateway.tensors.json_documents import object_in
from catenary_services.errors import InvalidInput

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
"""The role that templates get for each role of a message: they know OpenAI's newer `developer` as
`system`."""
_MOST_CALLS = 128
_LONGEST_ID = 256


def messages_of(value: Any) -> list[dict[str, object]]:
    """Returns the messages of a conversation.

    Raises:
        InvalidInput: There are none, or one is wrong or has what is not offered.
    """
    if not isinstance(value, list) or not value:
        raise InvalidInput("messages", "must be a list of messages and not empty")
    messages = [_message(each, f"messages[{at}]") for at, each in enumerate(value)]
    names: dict[object, str] = {}
    for message in messages:
        calls: Any = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool" and message["tool_call_id"] in names:
            # Some templates want it; OpenAI's clients leave it out.
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _message(value: Any, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(where, "must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidInput(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for name, why in (("audio", "is not offered"), ("function_call", "has become tool_calls")):
        if value.get(name):
            raise InvalidInput(f"{where}.{name}", why)
    message: dict[str, object] = {"role": ROLES[role]}
    if role == "assistant":
        message |= _answer(value, where)
    elif value.get("tool_calls"):
        raise InvalidInput(f"{where}.tool_calls", "are for messages of the assistant")
    if role == "tool":
        message["tool_call_id"] = _call_id(value.get("tool_call_id"), f"{where}.tool_call_id")
    content = value.get("content")
    # An answer may be nothing but calls.
    is_absent = content is None and "tool_calls" in message
    return message | {"content": "" if is_absent else _content(content, f"{where}.content")}


def _answer(value: Mapping[str, Any], where: str) -> dict[str, object]:
    """Returns what an earlier answer has beside its content."""
    answer: dict[str, object] = {}
    # Templates decide whether the model sees its earlier reasoning again.
    if isinstance(reasoning := value.get("reasoning_content"), str):
        answer["reasoning_content"] = reasoning
    calls, named = value.get("tool_calls"), f"{where}.tool_calls"
    if calls is None or calls == []:
        return answer
    if not isinstance(calls, list):
        raise InvalidInput(named, "must be a list of calls")
    if len(calls) > _MOST_CALLS:
        raise InvalidInput(named, f"are {len(calls)}, at most {_MOST_CALLS} may be")
    answer["tool_calls"] = [_call(each, f"{named}[{at}]") for at, each in enumerate(calls)]
    return answer


def _call(value: Any, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise InvalidInput(where, "must be the call of a function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidInput(f"{where}.function", "must be an object")
    name = function_name(function.get("name"), f"{where}.function.name")
    arguments, named = function.get("arguments"), f"{where}.function.arguments"
    if arguments is not None and not isinstance(arguments, str):
        raise InvalidInput(named, "must be a JSON object as text")
    # Templates write arguments themselves, and so get them as objects.
    document = object_in(arguments, named) if arguments else {}
    return {
        "id": _call_id(value.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": document},
    }


def _call_id(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_ID:
        raise InvalidInput(where, f"must be the id of a call, of 1 to {_LONGEST_ID} characters")
    return value


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidInput(where, "must be a text or a list of parts")
    parts: list[str] = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind if isinstance(kind, str) else "?"
            raise InvalidInput(
                f"{where}[{at}].type", f"{shown[:40]!r} is not offered: this model reads text only"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"{where}[{at}].text", "must be a text")
        parts.append(part["text"])
    # vLLM joins parts like this for templates that take only text.
    return "\n".join(parts)
