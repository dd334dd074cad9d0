"""The fields of a chat that concern tools: which there are, and how the model is to use them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from catenary_gateway.generation.forms.tool_use import ToolDefinition, ToolUse
from catenary_gateway.openai_http.fields import Fields, flag
from catenary_services.errors import InvalidInput

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""The fields of a body that `tools_of` reads."""
MOST_TOOLS = 128
"""Most tools of a request, as with OpenAI."""
MOST_SCHEMA_BYTES = 65_536
"""Most bytes of all schemas and descriptions of a request's tools together."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")


def function_name(value: Any, where: str) -> str:
    """Returns the name of a function.

    Raises:
        InvalidInput: It is none; the error names `where`.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidInput(where, "must have 1 to 64 letters, digits, _ and - and nothing else")
    return value


def tools_of(fields: Fields) -> ToolUse | None:
    """Returns the tools that the model may call; None if it may call none.

    Raises:
        InvalidInput: A field is wrong, or asks for what is not offered.
    """
    tools, choice = _definitions(fields.get("tools")), fields.get("tool_choice")
    parallel = fields.get("parallel_tool_calls") is None or flag(fields, "parallel_tool_calls")
    if isinstance(choice, dict):
        callable_tools, required = _chosen(choice, tools)
        # A function that is named is called exactly once, as with OpenAI.
        parallel = parallel and choice.get("type") != "function"
    elif choice is None or choice in _MODES:
        callable_tools, required = tools, choice == "required"
    else:
        text = f"must be one of {', '.join(_MODES)}, or name a function"
        raise InvalidInput("tool_choice", text)
    if required and not callable_tools:
        raise InvalidInput("tool_choice", "needs tools, and the request has none")
    if not tools or choice == "none":
        # What the model is not told of, it does not call.
        return None
    return ToolUse(tools, callable_tools, required=required, parallel=parallel)


def _definitions(value: Any) -> tuple[ToolDefinition, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput("tools", "must be a list of tools")
    if len(value) > MOST_TOOLS:
        raise InvalidInput("tools", f"are {len(value)}, at most {MOST_TOOLS} may be")
    tools = tuple(_definition(each, f"tools[{at}]") for at, each in enumerate(value))
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidInput(f"tools[{at}].function.name", f"{tool.name!r} is there twice")
        names.add(tool.name)
    size = sum(len(json.dumps(tool.document)) for tool in tools)
    if size > MOST_SCHEMA_BYTES:
        raise InvalidInput("tools", f"have {size} bytes, at most {MOST_SCHEMA_BYTES} are read")
    return tools


def _definition(value: Any, where: str) -> ToolDefinition:
    if not isinstance(value, dict):
        raise InvalidInput(where, "must be an object")
    if value.get("type") != "function":
        raise InvalidInput(f"{where}.type", "must be function: no other tools are offered")
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidInput(f"{where}.function", "must be an object")
    where = f"{where}.function"
    description, parameters = function.get("description"), function.get("parameters")
    strict = function.get("strict")
    if description is not None and not isinstance(description, str):
        raise InvalidInput(f"{where}.description", "must be a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidInput(f"{where}.parameters", "must be a JSON Schema, an object")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidInput(f"{where}.parameters.type", "must be object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidInput(f"{where}.strict", "must be true or false")
    name = function_name(function.get("name"), f"{where}.name")
    # A schema without a type allows anything, and arguments are always an object.
    schema = {"type": "object", **parameters} if parameters else None
    return ToolDefinition(name, description or "", schema, bool(strict))


def _chosen(
    choice: Fields, tools: Sequence[ToolDefinition]
) -> tuple[tuple[ToolDefinition, ...], bool]:
    """Returns the tools that may be called, and whether one must be."""
    if choice.get("type") == "function":
        return (_named(choice, tools, "tool_choice"),), True
    allowed = choice.get("allowed_tools")
    if choice.get("type") != "allowed_tools" or not isinstance(allowed, dict):
        raise InvalidInput("tool_choice.type", "must be function, or allowed_tools")
    where, listed = "tool_choice.allowed_tools", allowed.get("tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidInput(f"{where}.mode", "must be auto or required")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_TOOLS:
        raise InvalidInput(f"{where}.tools", f"must be a list of 1 to {MOST_TOOLS} tools")
    found = [_named(each, tools, f"{where}.tools[{at}]") for at, each in enumerate(listed)]
    names = {tool.name for tool in found}
    return tuple(tool for tool in tools if tool.name in names), allowed["mode"] == "required"


def _named(value: Any, tools: Sequence[ToolDefinition], where: str) -> ToolDefinition:
    function = value.get("function") if isinstance(value, dict) else None
    where = f"{where}.function.name"
    name = function_name(function.get("name") if isinstance(function, dict) else None, where)
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidInput(where, f"{name!r} is none of the tools")
