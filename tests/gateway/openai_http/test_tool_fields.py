"""The fields of tools and calls: what they ask for, or a refusal that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_gateway.generation.forms.tool_use import NO_PARAMETERS
from catenary_gateway.generation.request import ChatPrompt
from catenary_gateway.openai_http.completion_request import chat_of
from catenary_gateway.openai_http.messages import messages_of
from catenary_gateway.openai_http.tool_fields import MOST_SCHEMA_BYTES, tools_of
from catenary_services.errors import InvalidInput

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str = "weather", **facts: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **facts}}


def call(arguments: Any = "{}", **facts: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function, **facts}


TWO = [tool(parameters=CITY, description="Says it."), tool("now", strict=True)]


def test_tools_are_read_as_openai_means_them() -> None:
    use = tools_of({"tools": TWO})
    assert use is not None
    assert [each.name for each in use.shown] == ["weather", "now"]
    assert use.shown == use.callable
    assert (use.required, use.parallel) == (False, True)
    assert use.constrained, "one of them is strict"
    assert use.shown[0].document == tool(description="Says it.", parameters=CITY)
    assert use.shown[1].document == tool("now", parameters=NO_PARAMETERS)
    loose = tools_of({"tools": [tool(parameters={"properties": {}}, strict=None)]})
    assert loose is not None
    assert not loose.constrained
    assert loose.shown[0].schema == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("choice", "callable_names", "required"),
    [
        (None, ["weather", "now"], False),
        ("auto", ["weather", "now"], False),
        ("required", ["weather", "now"], True),
        (tool("now"), ["now"], True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("now")]}},
            ["now"],
            False,
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [tool("now"), tool()]},
            },
            ["weather", "now"],
            True,
        ),
    ],
)
def test_a_choice_says_which_may_and_whether_one_must_be_called(
    choice: object, callable_names: list[str], required: bool
) -> None:
    use = tools_of({"tools": TWO, "tool_choice": choice, "parallel_tool_calls": False})
    assert use is not None
    assert [each.name for each in use.shown] == ["weather", "now"]
    assert [each.name for each in use.callable] == callable_names
    assert (use.required, use.parallel) == (required, False)


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_function_that_is_named_is_called_exactly_once(parallel: bool | None) -> None:
    fields = {"tools": TWO, "parallel_tool_calls": parallel}
    for choice, expected in ((tool("now"), False), ("required", parallel is not False)):
        use = tools_of(fields | {"tool_choice": choice})
        assert use is not None
        assert (use.required, use.parallel) == (True, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": TWO, "tool_choice": "none"},
        {"tool_choice": "none"},
    ],
)
def test_a_model_that_may_call_nothing_is_told_of_nothing(fields: dict[str, object]) -> None:
    assert tools_of(fields) is None


MANY = [tool(f"f{number}") for number in range(129)]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": {}}),
    ("tools", {"tools": MANY}),
    ("tools", {"tools": [tool(description="x" * MOST_SCHEMA_BYTES)]}),
    ("tools[1]", {"tools": [tool(), "now"]}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools[0].type", {"tools": [{"function": {"name": "x"}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[3].function.name", {"tools": [*MANY[:3], tool("find it")]}),
    ("tools[0].function.name", {"tools": [tool("")]}),
    ("tools[0].function.name", {"tools": [tool("x" * 65)]}),
    ("tools[0].function.name", {"tools": [tool("\u00e4")]}),
    ("tools[0].function.name", {"tools": [tool("find\n")]}),
    ("tools[1].function.name", {"tools": [tool(), tool()]}),
    ("tools[0].function.description", {"tools": [tool(description=5)]}),
    ("tools[0].function.parameters", {"tools": [tool(parameters=[])]}),
    ("tools[0].function.parameters.type", {"tools": [tool(parameters={"type": "string"})]}),
    ("tools[0].function.strict", {"tools": [tool(strict="yes")]}),
    ("tool_choice", {"tools": TWO, "tool_choice": "any"}),
    ("tool_choice", {"tools": TWO, "tool_choice": 5}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice.type", {"tools": TWO, "tool_choice": {}}),
    ("tool_choice.type", {"tools": TWO, "tool_choice": {"type": ["function"]}}),
    ("tool_choice.function.name", {"tools": TWO, "tool_choice": tool("tomorrow")}),
    ("tool_choice.function.name", {"tools": TWO, "tool_choice": {"type": "function"}}),
    ("tool_choice.function.name", {"tool_choice": tool()}),
    (
        "tool_choice.allowed_tools.mode",
        {"tools": TWO, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": TWO}}},
    ),
    (
        "tool_choice.allowed_tools.tools",
        {"tools": TWO, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
    ),
    (
        "tool_choice.allowed_tools.tools[1].function.name",
        {
            "tools": TWO,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [tool(), tool("tomorrow")]},
            },
        },
    ),
    ("parallel_tool_calls", {"tools": TWO, "parallel_tool_calls": "no"}),
]


@pytest.mark.parametrize(("field", "fields"), WRONG)
def test_what_is_wrong_is_refused_by_its_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        tools_of(fields)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["functions", "function_call"])
def test_the_older_form_is_refused_in_favour_of_tools(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(InvalidInput, match=r"send.*( tool|these)") as caught:
        chat_of(body | {field: [{"name": "f"}] if field == "functions" else {"name": "f"}})
    assert caught.value.field == field
    assert isinstance(chat_of(body | {field: None}).prompts[0], ChatPrompt)


def test_calls_and_their_results_are_for_templates() -> None:
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call('{"city": "Bern"}')], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12"}]},
        {"role": "tool", "tool_call_id": "b", "content": "13", "name": "other"},
        {"role": "assistant", "content": "So.", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [call("")], "refusal": None},
    ]
    _, answer, result, other, plain, empty = messages_of(said)
    (called,) = answer["tool_calls"]
    assert called == call({"city": "Bern"})
    assert (answer["content"], answer["reasoning_content"]) == ("", "Hm")
    assert result == {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "12"}
    assert "name" not in other
    assert plain == {"role": "assistant", "content": "So."}
    assert empty["tool_calls"] == [call({})]


USER = {"role": "user", "content": "x"}
WRONG_MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("role", {"role": "function", "content": "x"}),
    ("content", {"role": "assistant"}),
    ("content", {"role": "tool", "tool_call_id": "a"}),
    ("tool_call_id", {"role": "tool", "content": "x"}),
    ("tool_call_id", {"role": "tool", "content": "x", "tool_call_id": "x" * 257}),
    ("tool_calls", USER | {"tool_calls": [call()]}),
    ("tool_calls", {"role": "assistant", "tool_calls": "x"}),
    ("tool_calls", {"role": "assistant", "tool_calls": [call()] * 129}),
    ("tool_calls[0]", {"role": "assistant", "tool_calls": ["x"]}),
    ("tool_calls[0]", {"role": "assistant", "tool_calls": [call(type="custom")]}),
    ("tool_calls[0].function", {"role": "assistant", "tool_calls": [call(function=1)]}),
    ("tool_calls[0].function.name", {"role": "assistant", "tool_calls": [call(function={})]}),
    ("tool_calls[1].id", {"role": "assistant", "tool_calls": [call(), call(id=5)]}),
    ("function_call", {"role": "assistant", "function_call": {"name": "f"}}),
    *(
        (
            "tool_calls[0].function.arguments",
            {"role": "assistant", "tool_calls": [call(arguments)]},
        )
        for arguments in ({"a": 1}, "[1]", '{"a": ', "{" * 5000, 5)
    ),
]


@pytest.mark.parametrize(("field", "message"), WRONG_MESSAGES)
def test_wrong_messages_are_refused_by_their_fields(field: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        messages_of([USER, message])
    assert caught.value.field == f"messages[1].{field}"


NAMES = ["type", "function", "name", "parameters", "strict", "tool_calls", "id", "arguments"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(NAMES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(["tools", "tool_choice", "parallel_tool_calls"]), VALUES, max_size=3
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", *NAMES]), VALUES, max_size=4), max_size=3
)


@given(FIELDS, MESSAGES)
def test_anything_is_read_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    refusals: list[InvalidInput] = []
    for read in (lambda: tools_of(fields), lambda: messages_of(messages)):
        try:
            read()
        except InvalidInput as error:
            refusals.append(error)
    assert all(error.details["field"] for error in refusals)
