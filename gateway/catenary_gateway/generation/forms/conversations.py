"""Tools and earlier calls in a conversation, as the chat template of a model takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from catenary_gateway.generation.forms.calls.tool_form import ToolForm
from catenary_gateway.generation.forms.tool_use import ToolDefinition

Message = Mapping[str, object]

_INSTRUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments, exactly like this:
{example}"""


def with_own_ids(messages: Iterable[Message], form: ToolForm) -> list[Message]:
    """Returns a conversation whose calls have ids that the model's template takes."""
    renamed: list[Message] = []
    for message in messages:
        changed = dict(message)
        if isinstance(answered := message.get("tool_call_id"), str):
            changed["tool_call_id"] = form.own_id(answered)
        if calls := _calls_of(message):
            changed["tool_calls"] = [{**call, "id": form.own_id(call["id"])} for call in calls]
        renamed.append(changed)
    return renamed


def written_out(
    messages: Sequence[Message], tools: Sequence[ToolDefinition], form: ToolForm
) -> list[Message]:
    """Returns a conversation for a template that knows no tools.

    The tools are described at the end of the system message, or in one of their own; calls and
    their results become text, results as what the user says.
    """
    told = [_written_message(message, form) for message in _joined_results(messages)]
    if not tools:
        return told
    instruction = _INSTRUCTION.format(
        tools="\n".join(json.dumps(tool.document, ensure_ascii=False) for tool in tools),
        example=form.written([form.call_pattern()]),
    )
    first = told[0]
    if first["role"] == "system":
        content = f"{first['content']}\n\n{instruction}"
        return [{**first, "content": content}, *told[1:]]
    return [{"role": "system", "content": instruction}, *told]


def _joined_results(messages: Iterable[Message]) -> Iterable[Message]:
    """Yields the messages; results of calls that follow each other become one message."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results.clear()
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _written_message(message: Message, form: ToolForm) -> Message:
    calls = _calls_of(message)
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    written = form.written([form.call(each["name"], each["arguments"]) for each in functions])
    content = "\n".join(
        text for text in (message["content"], written) if isinstance(text, str) and text
    )
    return {"role": message["role"], "content": content}


def _calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []
