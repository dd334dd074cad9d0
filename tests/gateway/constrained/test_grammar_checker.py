"""Grammars are tried out in a process that they may end, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from catenary_gateway.generation.grammar.checker import (
    GrammarChecker,
    GrammarLimits,
    GrammarModel,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, Overloaded
from catenary_services.grammar.vocabulary import TokenVocabulary
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

VOCABULARY = TokenVocabulary(tiny_tokenizer().to_str(), 259, (END,))
MODEL = GrammarModel(ModelKey("tiny", "1"), tiny_tokenizer().to_str, 259)
GOOD, WRONG = 'start: "ab" | "cd"', "start: nothing"


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def refused(checker: GrammarChecker, grammar: str, model: GrammarModel = MODEL) -> str:
    with pytest.raises(InvalidInput) as caught:
        await checker.check(model, grammar, "guided_grammar")
    assert caught.value.field == "guided_grammar"
    return caught.value.message


async def test_a_good_grammar_passes_and_a_wrong_one_is_named(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar")
    assert "unknown name" in await refused(checker, WRONG)
    await checker.check(MODEL, GOOD, "grammar")


async def test_rules_in_ebnf_come_back_as_agents_know_them(checker: GrammarChecker) -> None:
    rules = 'root ::= ("yes" | "no") " " [0-9]{1,2}\n'
    for _ in range(2):
        made = await checker.check(MODEL, rules, "guided_grammar")
        assert made != rules
        for text, matches in (("yes 1", True), ("no 23", True), ("yes x", False)):
            matcher = VOCABULARY.matcher(made)
            try:
                matcher.accept(tokens_of(text))
            except InvalidInput:
                assert not matches
            else:
                assert matches == bool(matcher.allowed()[END])
    assert "as EBNF" in await refused(checker, 'root ::= "a')
    assert await checker.check(MODEL, GOOD, "grammar") == GOOD


async def test_what_is_known_is_not_tried_again(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar")
    said = await refused(checker, WRONG)
    process = checker._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            await checker.check(MODEL, GOOD, "grammar")
            assert await refused(checker, WRONG) == said
    finally:
        os.kill(process.pid, signal.SIGCONT)


async def test_a_grammar_that_matches_nothing_sayable_is_refused(checker: GrammarChecker) -> None:
    other = GrammarModel(
        ModelKey("other", "1"), tiny_tokenizer().to_str, 50
    )  # rows without letters
    assert "no text" in await refused(checker, GOOD, other)


async def test_an_answer_so_far_must_match(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar", tokens_of("a"))
    with pytest.raises(InvalidInput, match="satisfy"):
        await checker.check(MODEL, GOOD, "grammar", tokens_of("x"))


async def test_more_models_than_are_kept_are_read_again(checker: GrammarChecker) -> None:
    for turn in range(2):
        for number in range(6):
            model = GrammarModel(ModelKey(f"m{number}", "1"), tiny_tokenizer().to_str, 259)
            await checker.check(model, f'start: "{turn}a"', "grammar")


@pytest.mark.parametrize("how", ["spins", "eats", "crashes"])
async def test_a_grammar_that_takes_too_much_ends_the_process_and_is_refused(how: str) -> None:
    limits = GrammarLimits(cpu_s=1, memory_bytes=1 << 30)
    checker = GrammarChecker(limits, "grammars.hungry_grammars")
    try:
        assert "takes more than" in await refused(checker, how)
        await checker.check(MODEL, GOOD, "grammar")
        assert "takes more than" in await refused(checker, how)
    finally:
        await checker.close()


async def test_a_vocabulary_that_ends_the_process_is_not_read_again_at_once() -> None:
    checker = GrammarChecker(GrammarLimits(cpu_s=1), "grammars.hungry_grammars")
    evil = GrammarModel(ModelKey("evil", "1"), tiny_tokenizer().to_str, 1)
    try:
        assert "tokenizer that can be used" in await refused(checker, GOOD, evil)
        await checker.check(MODEL, GOOD, "grammar")
        process = checker._process
        assert "tokenizer that can be used" in await refused(checker, f"{GOOD} ", evil)
        await checker.check(MODEL, f"{GOOD} ", "grammar")
        assert checker._process is process
    finally:
        await checker.close()


async def test_a_process_that_others_have_ended_is_started_again(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar")
    assert checker._process is not None
    checker._process.kill()
    with pytest.raises(Overloaded):
        await checker.check(MODEL, 'start: "x"', "grammar")
    await checker.check(MODEL, 'start: "x"', "grammar")


async def test_a_process_that_stands_still_is_ended_in_time(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar")
    usual, checker._limits = checker._limits, GrammarLimits(wall_clock_s=0.5)
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    with pytest.raises(Overloaded):
        await checker.check(MODEL, WRONG, "grammar")
    assert checker._process is None
    checker._limits = usual
    assert "unknown name" in await refused(checker, WRONG)


async def test_few_may_wait_and_one_who_goes_away_disturbs_nobody(checker: GrammarChecker) -> None:
    await checker.check(MODEL, GOOD, "grammar")
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    waiting = [
        asyncio.ensure_future(checker.check(MODEL, f'start: "w{n}"', "grammar")) for n in range(16)
    ]
    await asyncio.sleep(0.05)
    with pytest.raises(Overloaded):
        await checker.check(MODEL, 'start: "one more"', "grammar")
    waiting[0].cancel()
    os.kill(checker._process.pid, signal.SIGCONT)
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1:] == [f'start: "w{n}"' for n in range(1, 16)]
    await checker.check(MODEL, 'start: "later"', "grammar")


HOSTILE = [
    "root ::= r0\n" + "".join(f'r{n} ::= "a" | [0-9] r{n + 1}\n' for n in range(2000)),
    "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000 + "\n",
    "start: /((a{1,500}){1,500}){1,500}/",
    'start: "a" ' + "start? " * 3000,
    "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "start: /" + "(" * 20_000 + "a" + ")" * 20_000 + "/",
    "start: /(.*a.*b.*c.*d.*e.*f.*){30}/",
    '{"grammars":[{"json_schema":' + '{"items":' * 8000 + "{}" + "}" * 8000 + "}]}",
    '{"grammars":[{"json_schema":{"type":"array","minItems":1000000000}}]}',
    '{"grammars":[{"json_schema":{"type":"string","minLength":100000000}}]}',
    '{"grammars":[{"json_schema":{"$ref":"#/a","a":{"$ref":"#/b"},"b":{"$ref":"#/a"}}}]}',
    '{"grammars":[{"json_schema":{"type":"object","properties":{'
    + ",".join(f'"p{n}":{{"enum":["v{n}"]}}' for n in range(2500))
    + "}}}]}",
    '{"grammars":[{"json_schema":{"allOf":['
    + ",".join(f'{{"pattern":"(a|b)*a(a|b){{{n % 20}}}"}}' for n in range(600))
    + "]}}]}",
    "start: " + " | ".join(f"/[a-z]*{n}[a-z]*/" for n in range(3000)),
    "%ignore /(a|aa)+$/\nstart: /(a|aa)+b/",
]


async def test_hostile_grammars_are_answered_and_the_next_one_passes(
    checker: GrammarChecker,
) -> None:
    for number, grammar in enumerate(HOSTILE):
        begun = time.process_time()
        with suppress(InvalidInput):
            await checker.check(MODEL, grammar[: 1 << 16], "grammar")
        assert time.process_time() - begun < 1.0, "the work is the other process's"
        await checker.check(MODEL, f'start: "after {number}"', "grammar")
