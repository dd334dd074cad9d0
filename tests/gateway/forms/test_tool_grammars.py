"""Grammars of calls admit what a model writes of its own and what its parser reads, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from catenary_gateway.generation.forms.answer_syntax import AnswerSyntax
from catenary_gateway.generation.forms.calls.grammars import MOST_CALLS
from catenary_gateway.generation.forms.calls.hermes import HermesForm
from catenary_gateway.generation.forms.calls.llama import LlamaForm
from catenary_gateway.generation.forms.calls.mistral import MistralForm
from catenary_gateway.generation.forms.calls.plain_json import PlainJsonForm
from catenary_gateway.generation.forms.calls.tool_form import ToolForm
from catenary_gateway.generation.forms.model_forms import ModelForms
from catenary_gateway.generation.forms.reasoning import ReasoningForm, ThinkingState
from catenary_gateway.generation.forms.tool_use import ToolDefinition, ToolUse
from catenary_gateway.openai_http.tool_fields import MOST_TOOLS
from catenary_services.errors import InvalidInput
from catenary_services.grammar.vocabulary import TokenVocabulary
from small_models.tiny_tokenizer import END, MORE, tiny_tokenizer, tokens_of

MARKS = (
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>"),
)
SPECIAL = {mark: MORE + at for at, mark in enumerate(MARKS)}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolDefinition("weather", "", CITY, strict=True), ToolDefinition("now"))
WEATHER = '{"name": "weather", "arguments": {"city": "Bern", "n": 3}}'
NOW = '{"name": "now", "arguments": {"x":[1,2]}}'
TAGGED = f"<tool_call>\n{WEATHER}\n</tool_call>"
TAGGED_NOW = f"<tool_call>\n{NOW}\n</tool_call>"
CONTENT = json.dumps({"grammars": [{"json_schema": {"type": "array"}}]})


@pytest.fixture(scope="module")
def tokens() -> TokenVocabulary:
    """The vocabulary of a tiny model, as agents have it."""
    return TokenVocabulary(tiny_tokenizer(*MARKS).to_str(), MORE + len(MARKS), (END,))


def admits(tokens: TokenVocabulary, grammar: str, text: str, special: Mapping[str, int]) -> bool:
    """True if a whole answer matches a grammar."""
    matcher = tokens.matcher(grammar)
    ids: list[int] = []
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), "")
        ids += [special[mark]] if mark else tokens_of(text[0])
        text = text[len(mark or text[0]) :]
    try:
        matcher.accept(ids)
    except InvalidInput:
        return False
    return bool(matcher.allowed()[END])


def use(*, required: bool = True, parallel: bool = True) -> ToolUse:
    return ToolUse(TOOLS, TOOLS, required=required, parallel=parallel)


def parameters(text: str) -> str:
    return text.replace("arguments", "parameters")


REQUIRED: list[tuple[ToolForm, list[str], list[str], list[str]]] = [
    (
        HermesForm(),
        [TAGGED],
        [f"{TAGGED}\n{TAGGED_NOW}"],
        ["Hi", f"Hi {TAGGED}", f"{TAGGED} x", TAGGED[:-1], TAGGED.replace("weather", "sun")],
    ),
    (
        MistralForm(later=False),
        [f"[TOOL_CALLS][{WEATHER}]", f"[TOOL_CALLS] [{WEATHER}]"],
        [f"[TOOL_CALLS][{WEATHER}, {NOW}]"],
        [WEATHER, "[TOOL_CALLS][]", "[TOOL_CALLS]now[ARGS]{}"],
    ),
    (
        MistralForm(later=True),
        ['[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'],
        ['[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city":"Bern"}'],
        ["[TOOL_CALLS]weather[ARGS]{}", "[TOOL_CALLS]sun[ARGS]{}"],
    ),
    (
        LlamaForm(),
        [parameters(WEATHER)],
        [f"{parameters(WEATHER)}; {parameters(NOW)}"],
        ["Hi", WEATHER, f"<|python_tag|>{parameters(WEATHER)}"],
    ),
    (
        PlainJsonForm(),
        [WEATHER, NOW],
        [f"[{WEATHER}]", f"[{WEATHER}, {NOW}]"],
        ["Hi", "[]", "{}", parameters(WEATHER)],
    ),
]


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize(("form", "single", "several", "wrong"), REQUIRED)
def test_forced_calls_are_calls_and_nothing_else(
    tokens: TokenVocabulary,
    form: ToolForm,
    single: list[str],
    several: list[str],
    wrong: list[str],
    special: Mapping[str, int],
) -> None:
    model = ModelForms(form, None, special)
    grammar = AnswerSyntax(model, use()).grammar("")
    assert all(admits(tokens, grammar, text, special) for text in single + several)
    assert not any(admits(tokens, grammar, text, special) for text in wrong)
    for text in single + several:
        parser = form.parser(["weather", "now"], lambda: "id")
        kinds = [type(event).__name__ for event in (*parser.push(text), *parser.end())]
        assert set(kinds) == {"CallStart", "ArgumentsPiece", "CallComplete"}
    alone = AnswerSyntax(model, use(parallel=False)).grammar("")
    assert all(admits(tokens, alone, text, special) for text in single)
    assert not any(admits(tokens, alone, text, special) for text in several)


FREE: list[tuple[ToolForm, list[str], list[str]]] = [
    (
        HermesForm(),
        ["", "Hi", f"Hi {TAGGED}\n{TAGGED_NOW}"],
        ["<tool_call>\nHi", f"{TAGGED} x", f"Hi {TAGGED}{TAGGED}"],
    ),
    (
        MistralForm(later=True),
        ["Hi", "Hi [TOOL_CALLS]now[ARGS]{}"],
        ["Hi [TOOL_CALLS]", "[TOOL_CALLS]sun[ARGS]{}"],
    ),
    (
        LlamaForm(),
        ["Hi {", parameters(WEATHER), f"<|python_tag|>{parameters(WEATHER)}"],
        ["{", " {}", parameters(WEATHER).replace("3", '"3"')],
    ),
    (PlainJsonForm(), ["Hi {", WEATHER, f"[{WEATHER}, {NOW}]"], ["{}", "[1]"]),
]


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize(("form", "right", "wrong"), FREE)
def test_free_answers_are_held_to_a_grammar_from_their_first_call_on(
    tokens: TokenVocabulary,
    form: ToolForm,
    right: list[str],
    wrong: list[str],
    special: Mapping[str, int],
) -> None:
    grammar = AnswerSyntax(ModelForms(form, None, special), use(required=False)).grammar("")
    assert [text for text in right if not admits(tokens, grammar, text, special)] == []
    assert [text for text in wrong if admits(tokens, grammar, text, special)] == []


def test_free_answers_of_loose_tools_are_held_to_none() -> None:
    loose = (ToolDefinition("now"),)
    form = AnswerSyntax(ModelForms(HermesForm()), ToolUse(loose, loose))
    assert form.grammar("") == ""
    assert AnswerSyntax(ModelForms(), None).grammar("start: /a/") == "start: /a/"


UNDECIDED, THINKING, ANSWERING = ThinkingState


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize(
    ("begin", "right", "wrong"),
    [
        (UNDECIDED, ["<think>\nHm < x\n</think>\n\n", ""], ["Hm</think>", "\n"]),
        (THINKING, ["Hm <tool_\n</think>\n\n", "<think>\nHm\n</think>", "</think>"], ["", "Hm"]),
        (ANSWERING, [""], ["<think></think>", "</think>"]),
    ],
)
@pytest.mark.parametrize(("content", "answer"), [("", TAGGED), (CONTENT, "[1, 2]")])
def test_grammars_begin_behind_the_reasoning(
    tokens: TokenVocabulary,
    begin: ThinkingState,
    right: list[str],
    wrong: list[str],
    content: str,
    answer: str,
    special: Mapping[str, int],
) -> None:
    model = ModelForms(HermesForm(), ReasoningForm(assumed=False), special)
    form = AnswerSyntax(model, None if content else use(), begin)
    grammar = form.grammar(content)
    assert [text for text in right if not admits(tokens, grammar, text + answer, special)] == []
    assert [text for text in wrong if admits(tokens, grammar, text + answer, special)] == []


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("content", [CONTENT, "start: /[a-c]+/"])
def test_an_answer_is_a_call_or_matches_its_own_grammar(
    tokens: TokenVocabulary, content: str, special: Mapping[str, int]
) -> None:
    model = ModelForms(HermesForm(), ReasoningForm(assumed=False), special)
    form = AnswerSyntax(model, use(required=False), THINKING)
    grammar = form.grammar(content)
    fits = "[1]" if content == CONTENT else "abc"
    right, wrong = (f"Hm</think>{fits}", f"Hm</think>\n{TAGGED}"), ("Hm</think>d", fits)
    assert all(admits(tokens, grammar, text, special) for text in right)
    assert not any(admits(tokens, grammar, text, special) for text in wrong)
    forced = AnswerSyntax(model, use(), THINKING).grammar(content)
    assert admits(tokens, forced, right[1], special)
    assert not admits(tokens, forced, right[0], special)


def test_rules_in_another_syntax_are_refused_beside_calls_and_reasoning() -> None:
    model = ModelForms(HermesForm(), ReasoningForm(assumed=False))
    for form in (AnswerSyntax(model, use(required=False)), AnswerSyntax(model, None, THINKING)):
        with pytest.raises(InvalidInput, match="must be Lark") as caught:
            form.grammar('root ::= "a"')
        assert caught.value.field == "guided_grammar"


def test_texts_of_schemas_are_not_taken_for_another_syntax(tokens: TokenVocabulary) -> None:
    odd = {"type": "object", "properties": {"x": {"enum": ["a ::= b"]}}, "required": ["x"]}
    tool = (ToolDefinition("odd", "a ::= b", odd),)
    grammar = AnswerSyntax(ModelForms(HermesForm()), ToolUse(tool, tool, required=True)).grammar("")
    assert grammar.startswith("{")
    text = '<tool_call>\n{"name": "odd", "arguments": {"x": "a ::= b"}}\n</tool_call>'
    assert admits(tokens, grammar, text, {})


@pytest.mark.parametrize("form", [LlamaForm(), PlainJsonForm()])
def test_content_that_may_look_like_a_call_is_refused(form: ToolForm) -> None:
    with pytest.raises(InvalidInput, match="tool_choice") as caught:
        AnswerSyntax(ModelForms(form), use(required=False)).grammar(CONTENT)
    assert caught.value.field == "response_format"


def test_an_answer_has_so_many_calls_at_most(tokens: TokenVocabulary) -> None:
    grammar = AnswerSyntax(ModelForms(HermesForm()), use()).grammar("")
    assert admits(tokens, grammar, "\n".join([TAGGED_NOW] * MOST_CALLS), {})
    assert not admits(tokens, grammar, "\n".join([TAGGED_NOW] * (MOST_CALLS + 1)), {})


def test_keywords_without_a_grammar_count_for_strict_tools_only(tokens: TokenVocabulary) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "string", "format": "odd-format"}}}
    for strict in (True, False):
        tool = (ToolDefinition("odd", "", odd, strict),)
        grammar = AnswerSyntax(
            ModelForms(HermesForm()), ToolUse(tool, tool, required=True)
        ).grammar("")
        if strict:
            with pytest.raises(InvalidInput):
                tokens.matcher(grammar)
        else:
            tokens.matcher(grammar)


def test_as_many_tools_as_a_request_may_have_are_forced(tokens: TokenVocabulary) -> None:
    many = tuple(ToolDefinition(f"tool-{number}", "", CITY) for number in range(MOST_TOOLS))
    grammar = AnswerSyntax(ModelForms(HermesForm()), ToolUse(many, many, required=True)).grammar("")
    assert admits(tokens, grammar, TAGGED.replace("weather", "tool-77"), {})


def test_a_grammar_that_is_too_long_is_refused() -> None:
    words = {"enum": [f"word {number}" for number in range(6000)]}
    tool = (ToolDefinition("f", "", {"type": "object", "properties": {"word": words}}),)
    with pytest.raises(InvalidInput) as caught:
        AnswerSyntax(ModelForms(HermesForm()), ToolUse(tool, tool, required=True)).grammar("")
    assert caught.value.field == "tools"
