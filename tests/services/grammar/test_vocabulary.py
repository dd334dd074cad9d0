"""Matchers of grammars: which tokens they allow, and that tokens alone bring them back."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenary_services.grammar.vocabulary import GrammarMatcher, TokenVocabulary
from small_models.tiny_tokenizer import BEGIN, END, PAD, tiny_tokenizer, tokens_of

ROWS = 300
"""Rows of the logits: more than the tokenizer's 259 tokens."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMARS = [
    json.dumps({"grammars": [{"json_schema": SCHEMA}]}),
    'start: "a" start "b" | "c"',
    "start: /[a-f]{2,20}(x|yy)/",
    'start: /(.|\\n){0,12}/ "\u20ac"',
]


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    return TokenVocabulary(tiny_tokenizer().to_str(), ROWS, (END, PAD))


def allowed(matcher: GrammarMatcher) -> list[int]:
    return np.flatnonzero(matcher.allowed()).tolist()


def test_only_what_matches_may_come_next(vocabulary: TokenVocabulary) -> None:
    matcher = vocabulary.matcher('start: "ab" | "ac"')
    assert matcher.allowed().shape == (ROWS,)
    assert allowed(matcher) == tokens_of("a")
    matcher.accept(tokens_of("a"))
    assert allowed(matcher) == tokens_of("bc")


def test_a_complete_answer_allows_every_end_and_nothing_else(vocabulary: TokenVocabulary) -> None:
    matcher = vocabulary.matcher('start: "ab"')
    matcher.accept(tokens_of("ab"))
    assert allowed(matcher) == [END, PAD]


def test_an_answer_that_may_end_may_also_go_on(vocabulary: TokenVocabulary) -> None:
    matcher = vocabulary.matcher('start: "a"+')
    assert allowed(matcher) == tokens_of("a")
    matcher.accept(tokens_of("a"))
    assert allowed(matcher) == sorted([END, PAD, *tokens_of("a")])


def test_special_tokens_and_rows_without_tokens_are_no_text(vocabulary: TokenVocabulary) -> None:
    matcher = vocabulary.matcher(r"start: /(.|\n)+/")
    assert not set(allowed(matcher)) & {BEGIN, END, PAD, *range(259, ROWS)}


def test_a_grammar_may_name_special_tokens(vocabulary: TokenVocabulary) -> None:
    matcher = vocabulary.matcher('start: <|im_start|> "a"')
    assert allowed(matcher) == [BEGIN]
    matcher.accept([BEGIN])
    assert allowed(matcher) == tokens_of("a")


def test_logits_may_have_fewer_rows_than_there_are_tokens() -> None:
    vocabulary = TokenVocabulary(tiny_tokenizer().to_str(), 250, (END,))
    assert vocabulary.matcher("start: /.+/").allowed().shape == (250,)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("", "Empty"),
        ("{}", "missing field"),
        ('start: "a', "lexer error"),
        ("start: nothing", "unknown name"),
        ('{"grammars": [{"json_schema": {"not": {}}}]}', 'Unimplemented keys: ["not"]'),
        ('{"grammars": [{"json_schema": {"type": "string", "pattern": "(?=a)b"}}]}', "look-ahead"),
        ("start: " + "(" * 2000 + '"a"' + ")" * 2000, "too deeply nested"),
    ],
)
def test_a_wrong_grammar_is_refused_with_what_is_wrong(
    vocabulary: TokenVocabulary, grammar: str, says: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        vocabulary.matcher(grammar).allowed()
    assert caught.value.field == "grammar"
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_tokens_that_do_not_match_are_refused(vocabulary: TokenVocabulary) -> None:
    with pytest.raises(InvalidInput, match="grammar"):
        vocabulary.matcher('start: "ab"').accept(tokens_of("b"))


@pytest.mark.parametrize("text", ["", "no JSON", "{}", "/etc/passwd"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        TokenVocabulary(text, ROWS, (END,))
    assert caught.value.field == "tokenizer.json"


@given(st.sampled_from(GRAMMARS), st.integers(0, 1 << 30), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_matcher_made_again_from_tokens_allows_the_same(
    vocabulary: TokenVocabulary, grammar: str, seed: int, cut: int
) -> None:
    rng = random.Random(seed)
    matcher = vocabulary.matcher(grammar)
    tokens: list[int] = []
    again = vocabulary.matcher(grammar)
    for step in range(40):
        if step == cut:  # it moves: all that is known elsewhere are the tokens
            again = vocabulary.matcher(grammar)
            again.accept(tokens)
        mask = matcher.allowed()
        assert (again.allowed() == mask).all()
        choices = sorted(set(np.flatnonzero(mask).tolist()) - {END, PAD})
        if not choices:
            break
        tokens.append(rng.choice(choices))
        matcher.accept(tokens[-1:])
        again.accept(tokens[-1:])


def test_a_copy_goes_on_alone(vocabulary: TokenVocabulary) -> None:
    first = vocabulary.matcher('start: "ab" | "cd"')
    second = first.copy()
    first.accept(tokens_of("a"))
    assert allowed(first) == tokens_of("b")
    assert allowed(second) == tokens_of("ac")
