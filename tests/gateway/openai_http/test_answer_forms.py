"""Every way to describe an answer becomes a grammar that matches just what was described."""

from __future__ import annotations

import json

import pytest

from catenary_gateway.openai_http.answer_forms import answer_form_of
from catenary_services.domain.sampling import MAX_GRAMMAR_BYTES
from catenary_services.errors import InvalidInput
from catenary_services.grammar.vocabulary import TokenVocabulary
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GOOD, BAD = ['{"a":1}', '{\n  "a": -2,\n  "b": "c"\n}'], ["{}", '{"a":"1"}', "[1]", '{"a":1}x']
LARK = 'start: ("yes" | "no") " " /[0-9]{1,2}/'


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    return TokenVocabulary(tiny_tokenizer().to_str(), 259, (END,))


def matches(vocabulary: TokenVocabulary, grammar: str, text: str) -> bool:
    matcher = vocabulary.matcher(grammar)
    try:
        matcher.accept(tokens_of(text))
    except InvalidInput:
        return False
    return bool(matcher.allowed()[END])


FORMS = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"x": [1]}'], ["[]", "1", "{} {}"]),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        },
        GOOD,
        BAD,
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": False, "schema": SCHEMA},
            }
        },
        GOOD,
        BAD,
    ),
    ({"guided_json": SCHEMA}, GOOD, BAD),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"}, GOOD, BAD),
    ({"guided_json": {}}, ["1", '"x"', "[{}]"], ["x", ""]),
    ({"guided_regex": "[a-c]+!"}, ["ab!", "c!"], ["!", "ab", "ab!!", " ab!"]),
    ({"guided_choice": ["yes", 'a "no"\n', "\u20ac"]}, ["yes", 'a "no"\n', "\u20ac"], ["y", "no"]),
    ({"guided_grammar": LARK}, ["yes 1", "no 23"], ["yes", "no 123"]),
    ({"structured_outputs": {"json": SCHEMA}}, GOOD, BAD),
    ({"structured_outputs": {"regex": "a|b"}}, ["a", "b"], ["ab", ""]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["a", "b"], ["ab"]),
    ({"structured_outputs": {"grammar": LARK}}, ["yes 1"], ["yes"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        ['{"a":1}'],
        ['{"a": 1}', '{"a":1 }'],
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "  "},
        ['{"a":1}', '{  "a":1}'],
        ['{ "a":1}'],
    ),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS, ids=[str(n) for n in range(len(FORMS))])
def test_what_is_described_matches_and_nothing_else(
    vocabulary: TokenVocabulary, fields: dict[str, object], good: list[str], bad: list[str]
) -> None:
    form = answer_form_of(fields)
    assert form.field in fields
    assert [text for text in good if not matches(vocabulary, form.grammar, text)] == []
    assert [text for text in bad if matches(vocabulary, form.grammar, text)] == []


def test_properties_come_in_the_order_of_the_schema(vocabulary: TokenVocabulary) -> None:
    properties = {"b": {"type": "null"}, "a": {"type": "null"}}
    grammar = answer_form_of({"guided_json": {"type": "object", "properties": properties}}).grammar
    assert matches(vocabulary, grammar, '{"b":null,"a":null}')
    assert not matches(vocabulary, grammar, '{"a":null,"b":null}')


def test_no_answer_is_all_whitespace(vocabulary: TokenVocabulary) -> None:
    grammar = answer_form_of({"response_format": {"type": "json_object"}}).grammar
    assert matches(vocabulary, grammar, "{" + " " * 24 + "}")
    assert not matches(vocabulary, grammar, "{" + " " * 25 + "}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None, "structured_outputs": None},
        {"response_format": {"type": "text"}},
    ],
)
def test_without_a_form_anything_may_be_answered(fields: dict[str, object]) -> None:
    assert answer_form_of(fields).grammar == ""


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": "yes"},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["\ud800"]}, "guided_choice"),
        ({"guided_choice": ["a"] * 4097}, "guided_choice"),
        ({"guided_grammar": ["root"]}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_json": {"description": "\u20ac" * MAX_GRAMMAR_BYTES}}, "guided_json"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answer_form_of(fields)
    assert caught.value.field == field


def test_options_of_the_engine_are_not_the_clients(vocabulary: TokenVocabulary) -> None:
    schema = {"not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidInput, match="not"):
        vocabulary.matcher(answer_form_of({"guided_json": schema}).grammar)
