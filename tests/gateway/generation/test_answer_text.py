"""Tokens back to text: whole characters, stop texts across tokens, the same as all at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catenary_gateway.generation.text.answer_text import AnswerText
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

TOKENIZER = tiny_tokenizer()


def said(text: AnswerText, tokens: list[int]) -> list[str]:
    """What is handed out, token by token, and at the end; stops at a stop text."""
    parts = []
    for token in tokens:
        parts.append(text.push(token))
        if text.stopped:
            return parts
    return [*parts, text.end()]


@given(st.lists(st.integers(0, 258), max_size=60))
@example(tokens_of("a🙂b"))
@example([131, 131, 131])
@settings(max_examples=200, deadline=None)
def test_pieces_together_are_what_the_tokenizer_makes_of_all(tokens: list[int]) -> None:
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(said(AnswerText(TOKENIZER, ()), tokens)) == whole


def test_characters_come_whole_and_special_tokens_never() -> None:
    parts = said(AnswerText(TOKENIZER, ()), [*tokens_of("é🙂"), END, *tokens_of("!")])
    assert [part for part in parts if part] == ["é", "🙂", "!"]


def test_half_a_character_at_the_end_is_replaced_as_the_tokenizer_does() -> None:
    tokens = tokens_of("🙂")[:2]
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(said(AnswerText(TOKENIZER, ()), tokens)) == whole != ""


@given(
    st.text(alphabet="abé", max_size=40),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_an_answer_ends_before_the_first_stop_text_and_no_sooner(
    text: str, stop: list[str]
) -> None:
    answer = AnswerText(TOKENIZER, stop)
    got = "".join(said(answer, tokens_of(text)))
    # Brute force: the first prefix that contains a stop text decides.
    for end in range(len(text) + 1):
        ends = [text[:end].find(each) for each in stop if each in text[:end]]
        if ends:
            assert answer.stopped
            assert got == text[: min(ends)]
            return
    assert not answer.stopped
    assert got == text


def test_nothing_of_a_stop_text_is_handed_out_early() -> None:
    answer = AnswerText(TOKENIZER, ["STOP"])
    parts = said(answer, tokens_of("a STO STOP b"))
    assert parts == ["a", " ", "", "", "", "STO ", "", "", "", ""]
    assert answer.stopped


def test_text_held_back_comes_at_the_end() -> None:
    assert said(AnswerText(TOKENIZER, ["xyz"]), tokens_of("axy")) == ["a", "", "", "xy"]


@pytest.mark.parametrize(("least", "expected"), [(0, ""), (3, "abab"), (100, "abababab")])
def test_stop_texts_count_behind_the_least_number_of_tokens(least: int, expected: str) -> None:
    answer = AnswerText(TOKENIZER, ["ab"], least)
    assert "".join(said(answer, tokens_of("abababab")))[: len(expected)] == expected
    assert answer.stopped == (least < 8)


class _Forgetful:
    """A tokenizer whose stream gives up at one token, as the library does on broken prefixes."""

    def step(self, tokenizer: object, token: int) -> str:
        raise RuntimeError("Invalid prefix encountered")


def test_a_stream_that_gives_up_loses_no_text() -> None:
    answer = AnswerText(TOKENIZER, ())
    first = answer.push(tokens_of("a")[0])
    answer._stream = _Forgetful()  # type: ignore[assignment]
    assert [first, *said(answer, tokens_of("bécd"))] == ["a", "b", "", "é", "c", "d", ""]
