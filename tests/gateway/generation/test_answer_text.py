"""Tokens back to text: whole characters, stop texts across tokens, the same as all at once."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from catenary_gateway.generation.text.answer_text import AnswerText
from catenary_gateway.generation.text.jailed.model_text import ModelText
from catenary_gateway.generation.text.token_table import TokenTable
from small_models.text_here import table_of
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

TOKENIZER = tiny_tokenizer()
TABLE = table_of(TOKENIZER)


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
    assert "".join(said(AnswerText(TABLE, ()), tokens)) == whole


def test_characters_come_whole_and_special_tokens_never() -> None:
    parts = said(AnswerText(TABLE, ()), [*tokens_of("é🙂"), END, *tokens_of("!")])
    assert [part for part in parts if part] == ["é", "🙂", "!"]


def test_half_a_character_at_the_end_is_replaced_as_the_tokenizer_does() -> None:
    tokens = tokens_of("🙂")[:2]
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(said(AnswerText(TABLE, ()), tokens)) == whole != ""


@given(
    st.text(alphabet="abé", max_size=40),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_an_answer_ends_before_the_first_stop_text_and_no_sooner(
    text: str, stop: list[str]
) -> None:
    answer = AnswerText(TABLE, stop)
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
    answer = AnswerText(TABLE, ["STOP"])
    parts = said(answer, tokens_of("a STO STOP b"))
    assert parts == ["a", " ", "", "", "", "STO ", "", "", "", ""]
    assert answer.stopped


def test_text_held_back_comes_at_the_end() -> None:
    assert said(AnswerText(TABLE, ["xyz"]), tokens_of("axy")) == ["a", "", "", "xy"]


@pytest.mark.parametrize(("least", "expected"), [(0, ""), (3, "abab"), (100, "abababab")])
def test_stop_texts_count_behind_the_least_number_of_tokens(least: int, expected: str) -> None:
    answer = AnswerText(TABLE, ["ab"], least)
    assert "".join(said(answer, tokens_of("abababab")))[: len(expected)] == expected
    assert answer.stopped == (least < 8)


SIGNED = {"<s>": 0, "</s>": 1, "▁": 2, "▁a": 3, "b": 4, "##c": 5, " not": 6, " do": 7, "d</w>": 8}
SIGNED |= {f"<0x{byte:02X}>": 9 + at for at, byte in enumerate((0x41, 0xE2, 0x82, 0xAC, 0xFF))}
SIGNED |= {"|": 14, "e ": 15, " ": 16, "": 17, "n't": 18, "é": 19}
GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "bytes": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "metaspace without prefix": decoders.Metaspace(prepend_scheme="never"),
    "gemma": decoders.Sequence(GEMMA),
    "llama 2": decoders.Sequence([*GEMMA, decoders.Strip(" ", 1, 0)]),
    "word pieces": decoders.WordPiece(),
    "word pieces as they are": decoders.WordPiece(cleanup=False),
    "byte pairs": decoders.BPEDecoder(),
    "speech": decoders.CTC("<s>", "|"),
    "nested": decoders.Sequence([decoders.Sequence([decoders.Fuse()]), decoders.ByteLevel()]),
    "stripped": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 1)]),
}


def signed_tokenizer(decoder: object) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(SIGNED, unk_token="b"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_those_of_the_library_for_every_decoder(name: str) -> None:
    tokenizer = signed_tokenizer(DECODERS[name])
    table = table_of(tokenizer)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, 25), max_size=12), st.booleans())
    def check(tokens: list[int], skips: bool) -> None:
        try:
            whole = tokenizer.decode(tokens, skip_special_tokens=skips)
        except BaseException:  # where the library panics, there is nothing to compare
            return
        assert table.decode(tokens, table.special if skips else ()) == whole

    check()


CONTINUED = sorted(DECODERS.keys() - {"stripped", "nested"})


@pytest.mark.parametrize("name", CONTINUED)
def test_pieces_are_those_of_the_library_or_come_sooner(name: str) -> None:
    tokenizer = signed_tokenizer(DECODERS[name])
    table = table_of(tokenizer)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, 19), max_size=12))
    def check(tokens: list[int]) -> None:
        theirs, stream = "", DecodeStream(skip_special_tokens=True)
        answer, ours = AnswerText(table), ""
        for token in tokens:
            try:
                theirs += stream.step(tokenizer, token) or ""
            except BaseException:  # it gives up where a decoder takes text back, or panics
                return
            ours += answer.push(token)
            assert ours.startswith(theirs)
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        if whole.startswith(theirs):
            assert ours + answer.end() == whole

    check()


def test_half_a_character_is_not_waited_for_for_ever() -> None:
    answer = AnswerText(table_of(signed_tokenizer(DECODERS["gemma"])))
    half = SIGNED["<0xE2>"]
    said = [answer.push(half) for _ in range(1000)]
    assert len("".join(said)) + len(answer.end()) >= 900
    assert "a" in answer.push(SIGNED["▁a"])


@pytest.mark.parametrize(
    ("decoder", "says"),
    [
        ({"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}, "regular expression"),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 99}, "much text"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}, "steps"),
        ({"type": "Replace"}, "malformed"),
        ({"type": "New"}, "not known"),
    ],
)
def test_decoders_that_could_do_harm_are_refused(decoder: dict[str, object], says: str) -> None:
    described = ModelText(signed_tokenizer(None)).description()
    described = msgspec.structs.replace(described, decoder=json.dumps(decoder))
    with pytest.raises(ValueError, match=says):
        TokenTable(described)
