"""Every form of calls, read in pieces of any size: the calls as they are, and all else as content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from catenary_gateway.generation.forms.calls.call_parser import CallParser
from catenary_gateway.generation.forms.calls.hermes import HermesForm, HermesParser
from catenary_gateway.generation.forms.calls.llama import LlamaForm, LlamaParser
from catenary_gateway.generation.forms.calls.mistral import MistralForm, MistralParser
from catenary_gateway.generation.forms.calls.plain_json import PlainJsonForm, PlainJsonParser
from catenary_gateway.generation.forms.events import AnswerEvent, ContentPiece
from catenary_gateway.generation.request import AnswerChunk
from catenary_gateway.openai_http.answer_parts import AnswerParts

NAMES = ("find", "add-one")
Calls = list[tuple[str, object]]


@dataclass
class Read:
    """What a parser makes of an answer."""

    content: str
    calls: Calls
    streamed_content: str
    finish_reason: str

    @classmethod
    def of(cls, parser: type[CallParser], pieces: Sequence[str]) -> Read:
        """Reads an answer as the OpenAI endpoint does."""
        numbers = itertools.count()
        parts = AnswerParts(parser(NAMES, lambda: f"id{next(numbers)}"))
        deltas = [delta for piece in pieces for delta in parts.take(AnswerChunk(piece, (), ""))]
        deltas += parts.take(AnswerChunk("", (), "stop"))
        message = parts.message()
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return cls(
            message["content"] or "",
            [(call["name"], json.loads(call["arguments"])) for call in calls],
            "".join(delta.get("content", "") for delta in deltas),
            parts.finish_reason("stop"),
        )


def read(parser: type[CallParser], *pieces: str) -> Read:
    return Read.of(parser, pieces)


def cut(text: str, places: Iterable[int]) -> list[str]:
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(at)]


F = {"find": {"city": "Paris ] } </tool_call> [ {", "n": [1, {"x": None}]}}
(CITY,) = F.values()
BODY = json.dumps(CITY)
GOOD: list[tuple[type[CallParser], str, str, Calls]] = [
    (
        HermesParser,
        f'Let me see.\n<tool_call>\n{{"name": "find", "arguments": {BODY}}}\n</tool_call>',
        "Let me see.\n",
        [("find", CITY)],
    ),
    (
        HermesParser,
        '<tool_call>{"name":"find","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"name": "add-one", "arguments": {"n": 1}}\n</tool_call>\n',
        "",
        [("find", {}), ("add-one", {"n": 1})],
    ),
    # The last tag, or the last brace, is missing.
    (HermesParser, '<tool_call>{"name": "find", "arguments": {}}', "", [("find", {})]),
    (
        HermesParser,
        '<tool_call>\n{"name": "find", "arguments": {"a": 1}\n</tool_call>',
        "",
        [("find", {"a": 1})],
    ),
    (
        HermesParser,
        '<tool_call>\n{"arguments": {"a": 1}, "name": "find"}\n</tool_call>',
        "",
        [("find", {"a": 1})],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "find", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("find", {"a": 1})],
    ),
    (HermesParser, '<tool_call>{"name": "find"}</tool_call>', "", [("find", {})]),
    (
        HermesParser,
        '<tool_call>{"name": "find", "arguments": {"a": "x\ny\t\\n"}}</tool_call>',
        "",
        [("find", {"a": "x\ny\t\n"})],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "find", "arguments": {}, "id": [1]}</tool_call> And <b>',
        " And <b>",
        [("find", {})],
    ),
    (
        LlamaParser,
        f'<|python_tag|>{{"name": "find", "parameters": {BODY}}}',
        "",
        [("find", CITY)],
    ),
    (
        LlamaParser,
        'Well: {"type": "function", "name": "find", "parameters": {"n": 1}}; '
        '{"name": "add-one", "parameters": {}}',
        "Well: ",
        [("find", {"n": 1}), ("add-one", {})],
    ),
    (
        MistralParser,
        f'Hm. [TOOL_CALLS] [{{"name": "find", "arguments": {BODY}}}, '
        '{"name": "add-one", "arguments": {}, "id": "abcdefghi"}]',
        "Hm. ",
        [("find", CITY), ("add-one", {})],
    ),
    (
        MistralParser,
        f'[TOOL_CALLS]find[ARGS]{BODY}[TOOL_CALLS]add-one[CALL_ID]a1b2c3d4e[ARGS]{{"n": 2}}',
        "",
        [("find", CITY), ("add-one", {"n": 2})],
    ),
    (MistralParser, '[TOOL_CALLS]find{"n": 2}', "", [("find", {"n": 2})]),
    (MistralParser, '[TOOL_CALLS]{"name": "find", "arguments": {}}', "", [("find", {})]),
    (
        PlainJsonParser,
        f'I call:\n```json\n{{"name": "find", "arguments": {BODY}}}\n```',
        "I call:\n",
        [("find", CITY)],
    ),
    (
        PlainJsonParser,
        '[{"name": "find", "parameters": {}}, {"name": "add-one", "arguments": {"n": 1}}]',
        "",
        [("find", {}), ("add-one", {"n": 1})],
    ),
    (
        PlainJsonParser,
        '{"type": "function", "function": {"name": "find", "arguments": {"a": "\u00e4"}}}',
        "",
        [("find", {"a": "\u00e4"})],
    ),
]
NO_CALLS: list[tuple[type[CallParser], str]] = [
    (HermesParser, "  \n"),
    (HermesParser, "a < b <tool_cal"),
    (HermesParser, "<<tool_call>\nnot JSON\n</tool_call>"),
    (HermesParser, "<tool_call></tool_call>"),
    (HermesParser, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": ["find"], "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "find", "arguments": "x"}</tool_call>'),
    (HermesParser, "<tool_call>{'name': 'find', 'arguments': {}}</tool_call>"),
    (HermesParser, '<tool_call>{"name": "find", "argu'),
    (HermesParser, '\n<tool_call>{"name": "find", "arguments": {"a": 1,}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "find", "arguments": {"a": True}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "find", "arguments": {"a": [1}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "find", "arguments": {"a": "cut o'),
    (LlamaParser, '<|python_tag|>print({"a": 1})'),
    (LlamaParser, 'if (x) { return {"name": "nobody", "parameters": {}}; }'),
    (LlamaParser, '{"name": "Ann", "age": 3}'),
    (MistralParser, "[TOOL_CALLS]other[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS]find[ARGX]{}"),
    (MistralParser, '[TOOL_CALLS][1, {"name": "find"}]'),
    (MistralParser, "[TOOL[TOOL_CALLS"),
    (PlainJsonParser, "```python\nx = {1: [2]}\n```"),
    (PlainJsonParser, '[{"name": "Ann"}, {"name": "Bob"}] `` {}'),
    (PlainJsonParser, "````"),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), GOOD)
def test_calls_are_read_and_text_beside_them_stays(
    parser: type[CallParser], text: str, content: str, calls: Calls
) -> None:
    whole = read(parser, text)
    assert (whole.content, whole.calls, whole.finish_reason) == (content, calls, "tool_calls")
    assert whole.streamed_content == content
    for first in range(len(text) + 1):
        assert read(parser, text[:first], text[first:]) == whole, text[:first]
    assert read(parser, *text) == whole


@pytest.mark.parametrize(("parser", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(parser: type[CallParser], text: str) -> None:
    whole = read(parser, text)
    assert (whole.content, whole.calls, whole.finish_reason) == (text, [], "stop")
    for first in range(len(text) + 1):
        assert read(parser, text[:first], text[first:]) == whole, text[:first]


def test_arguments_that_are_nested_too_deeply_are_content() -> None:
    depth = 100_000
    deep = f'{{"name": "find", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}'
    assert read(PlainJsonParser, deep) == Read(deep, [], "}", "stop")


def test_a_call_between_others_that_break_off_is_read_alone() -> None:
    good = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    broken = '<tool_call>{"name": "find", "arguments": {"a": nil}}</tool_call>'
    whole = read(HermesParser, f"{broken}{good}{broken}")
    assert (whole.content, whole.calls) == (broken * 2, [("find", {})])


def test_arguments_are_given_as_they_come() -> None:
    parser = HermesParser(NAMES, lambda: "an id")
    seen: list[AnswerEvent] = []
    text = '<tool_call>{"name": "find", "arguments": {"text": "' + "long " * 100
    for char in text:
        seen += parser.push(char)
    parts = AnswerParts(parser)
    given = "".join(event.text for event in seen if hasattr(event, "text"))
    assert given == '{"text": "' + "long " * 100
    assert parts.message()["content"] == ""


def test_prose_is_given_to_its_last_character() -> None:
    parser = HermesParser(NAMES, lambda: "an id")
    assert list(parser.push("Hello")) == [ContentPiece("Hello")]
    assert list(parser.push(" a<b")) == [ContentPiece(" a<b")]
    assert list(parser.push("<tool")) == []
    assert list(parser.push("box>")) == [ContentPiece("<toolbox>")]


def test_json_that_is_no_call_is_given_as_it_comes() -> None:
    parser = PlainJsonParser(NAMES, lambda: "an id")
    assert list(parser.push('{"answer": "so')) == [ContentPiece('{"answer": "so')]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3)
PROSE = st.text(st.characters(exclude_characters="<[{`;,", codec="utf-8"), max_size=30)
FORMS: list[tuple[type[CallParser], Callable[[Calls], str]]] = [
    (HermesParser, lambda calls: written(HermesForm(), calls)),
    (LlamaParser, lambda calls: written(LlamaForm(), calls)),
    (MistralParser, lambda calls: written(MistralForm(later=False), calls)),
    (MistralParser, lambda calls: "".join(map(later_form, calls))),
    (PlainJsonParser, lambda calls: written(PlainJsonForm(), calls)),
]


def written(form: object, calls: Calls) -> str:
    return form.written([form.call(*call) for call in calls])  # type: ignore[attr-defined]


def later_form(call: tuple[str, object]) -> str:
    return f"[TOOL_CALLS]{call[0]}[ARGS]{json.dumps(call[1])}"


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_what_a_model_writes_is_read_in_any_pieces(form: int) -> None:
    parser, write = FORMS[form]

    @given(PROSE, CALLS, st.lists(st.integers(0, 10**6), max_size=8))
    def check(prose: str, calls: Calls, places: list[int]) -> None:
        text = prose + (write(calls) if calls else "")
        whole = Read.of(parser, cut(text, places))
        assert whole.calls == calls
        if calls and not prose.strip():
            prose = ""  # white space around calls is nobody's
        assert whole.content == whole.streamed_content == prose
        assert whole.finish_reason == ("tool_calls" if calls else "stop")

    check()


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *('{"name": "find", "arguments": {', '"arguments": ', '"name": "find"', '"name": "x"'),
        *("{", "}", "[", "]", ",", ";", ":", '"', "\\", "`", "```", "```json\n", "<", "find", "1"),
        *(" ", "\n", "so", "\u00e4", "null", "True"),
    ]
)


@given(
    st.sampled_from([HermesParser, LlamaParser, MistralParser, PlainJsonParser]),
    st.lists(PIECES, max_size=25).map("".join),
    st.lists(st.integers(0, 10**6), max_size=8),
)
@example(HermesParser, '<tool_call>{"name": "find", "arguments": {}},', [3])
@example(PlainJsonParser, '[{"name": "find", "arguments": {}} so', [])
def test_any_text_is_read_alike_in_any_pieces_and_none_is_lost(
    parser: type[CallParser], text: str, places: list[int]
) -> None:
    whole = read(parser, text)
    assert Read.of(parser, cut(text, places)) == whole
    if not whole.calls:
        assert whole.content == text
    for _, arguments in whole.calls:
        assert isinstance(arguments, dict)
    # Content is what is left of the text, in its order.
    rest = iter(text)
    assert all(char in rest for char in whole.content)
