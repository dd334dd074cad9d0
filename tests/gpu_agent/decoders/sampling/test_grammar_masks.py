"""Masks made beside the steps: each behind the right tokens, and a problem for one answer only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from catenary_agent.decoders.sampling.grammar_masks import AnswerMask, GrammarMasks
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import LENGTH, STOP, SessionSampler
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.grammar.vocabulary import TokenVocabulary
from small_models.tiny_tokenizer import END, PAD, tiny_tokenizer, tokens_of

ROWS = 300
ENDS = (END, PAD)


class Masks:
    """Masks, and who was told that they are there."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.reads = 0
        self.told: queue.Queue[tuple[int, CatenaryError | None]] = queue.Queue()
        self.masks = GrammarMasks(self._read, lambda *told: self.told.put(told))

    def _read(self) -> TokenVocabulary:
        self.reads += 1
        assert self.may_read.wait(30)
        return TokenVocabulary(tiny_tokenizer().to_str(), ROWS, ENDS)

    def begin(self, grammar: str, answer: str = "", session: int = 1, least: int = 0) -> AnswerMask:
        return self.masks.begin(session, grammar, tokens_of(answer), least)

    def heard(self) -> tuple[int, CatenaryError | None]:
        return self.told.get(timeout=30)


@pytest.fixture
def here() -> Iterator[Masks]:
    made = Masks()
    yield made
    made.may_read.set()
    made.masks.close()
    for thread in made.masks._threads:
        thread.join(30)
        assert not thread.is_alive()


def taken(mask: AnswerMask) -> list[int]:
    allowed = mask.take()
    assert allowed is not None
    return np.flatnonzero(allowed).tolist()


def test_each_token_has_the_mask_of_the_tokens_before_it(here: Masks) -> None:
    mask = here.begin('start: "abc" | "ax"')
    assert here.heard() == (1, None)
    for token, follows in (("a", "bx"), ("b", "c")):
        assert set(tokens_of(token)) <= set(taken(mask))
        mask.accept(*tokens_of(token))
        assert taken(mask) == tokens_of(follows)
        assert taken(mask) == tokens_of(follows)  # a step that failed is computed once more
    mask.accept(*tokens_of("c"))
    assert taken(mask) == list(ENDS)


def test_an_answer_from_elsewhere_goes_on_behind_its_tokens(here: Masks) -> None:
    mask = here.begin('start: "abc" | "ax"', "ab")
    assert taken(mask) == tokens_of("c")


def test_tokens_that_come_while_it_compiles_are_not_lost(here: Masks) -> None:
    here.may_read.clear()
    mask = here.begin('start: "abcd"', "a")
    mask.accept(*tokens_of("b"))
    mask.accept(*tokens_of("c"))
    assert here.told.empty()
    here.may_read.set()
    assert taken(mask) == tokens_of("d")
    assert here.heard() == (1, None)


def test_every_session_hears_once(here: Masks) -> None:
    grammars = ['start: "a"', "start: nothing", 'start: "a"', "start: nothing"]
    masks = [here.begin(grammar, session=at) for at, grammar in enumerate(grammars)]
    told = dict(here.heard() for _ in masks)
    assert told[0] is told[2] is None
    for at in (1, 3):
        assert isinstance(told[at], InvalidInput)
        assert masks[at].take() is None
        assert masks[at].problem is told[at]
    assert here.told.empty()
    assert here.reads == 1


def test_a_token_that_does_not_match_is_a_problem_of_its_answer(here: Masks) -> None:
    wrong, right = here.begin('start: "ab"'), here.begin('start: "ab"', session=2)
    wrong.accept(*tokens_of("x"))
    assert wrong.take() is None
    assert isinstance(wrong.problem, InvalidInput)
    assert taken(right) == tokens_of("a")


def test_an_answer_is_as_long_as_it_must_be_where_it_can_be(here: Masks) -> None:
    mask = here.begin('start: "a" | "aa" | "aaa"', least=2)
    for count in range(3):
        found = taken(mask)
        assert set(found) & set(ENDS) == (set(ENDS) if count >= 2 else set())
        mask.accept(*tokens_of("a"))
    short = here.begin('start: "a"', "a", session=2, least=5)
    assert taken(short) == list(ENDS), "it is complete and cannot go on"


def test_a_dropped_answer_is_not_worked_on(here: Masks) -> None:
    here.may_read.clear()
    busy, dropped = here.begin('start: "a"'), here.begin('start: "b"', session=2)
    dropped.drop()
    here.may_read.set()
    assert taken(busy) == tokens_of("a")
    assert here.begin('start: "c"', session=3).take() is not None
    told = [here.heard(), here.heard()]
    assert [session for session, _ in told] == [1, 3]


def sampler_of(here: Masks, grammar: str, **values: object) -> SessionSampler:
    parameters = SamplingParameters(grammar=grammar, **values)  # type: ignore[arg-type]
    made = SessionSampler(parameters, (5, 6), 2, ENDS)
    made.mask = here.masks.begin(1, grammar, (), parameters.min_tokens)
    return made


def said(sampler: SessionSampler, seed: int = 0) -> tuple[bytes, str]:
    """Returns the text that random logits make of a sampler, and why it ended."""
    rng, chooser, text = np.random.default_rng(seed), numpy_chooser(ROWS), bytearray()
    while True:
        assert sampler.take_mask()
        logits = rng.standard_normal((1, ROWS)).astype(np.float32)
        (token,) = chooser.choose(logits, [(1, sampler)], [0])
        reason = sampler.accept(token)
        if reason == STOP:
            return bytes(text), reason
        text.append(token - 3)
        if reason:
            return bytes(text), reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_sampler_says_what_matches_and_ends_there(
    here: Masks, temperature: float, ignore_eos: bool
) -> None:
    sampler = sampler_of(
        here, 'start: "ab" | "acd"', temperature=temperature, ignore_eos=ignore_eos
    )
    text, reason = said(sampler)
    assert text in (b"ab", b"acd")
    assert reason == STOP


def test_an_answer_that_is_cut_off_ends_by_its_length(here: Masks) -> None:
    assert said(sampler_of(here, 'start: "abcdef"', max_tokens=3)) == (b"abc", LENGTH)


def test_penalties_and_biases_choose_only_among_what_matches(here: Masks) -> None:
    against = tuple((token, -100.0) for token in tokens_of("ab"))
    sampler = sampler_of(here, 'start: "abab"', logit_bias=against, repetition_penalty=5.0)
    assert said(sampler) == (b"abab", STOP)
