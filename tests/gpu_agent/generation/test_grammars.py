"""Answers with a grammar, over rings of agents: alone, beside others, moved, and started again."""

from __future__ import annotations

import re
import threading

import pytest

from tests.support.ring_harness import (
    BLOCKS,
    END,
    letters_of,
    opening,
    toy,
    toy_vocabulary,
    undisturbed,
)

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
GRAMMAR = "start: (/[a-f]{2,4}/ /[A-F]{1,3}/){4} /[g-z]{8}/"
FORM = re.compile(r"([a-f]{2,4}[A-F]{1,3}){4}[g-z]{8}")
RINGS = {
    1: [("a-0", 0, BLOCKS)],
    3: [("a-0", 0, 1), ("a-1", 1, 4), ("a-2", 4, BLOCKS)],
}
OTHER = [("b-0", 0, 2), ("b-1", 2, BLOCKS)]


async def hosts(rings, *chains) -> None:
    for chain in chains:
        for agent, first, last in chain:
            await rings.agent(agent, toy(first, last))


def asked(chain, grammar: str = GRAMMAR, **options: object):
    options = {"max_tokens": 64, "ignore_eos": False} | options
    return opening(chain, options.pop("prompt", PROMPT), grammar=grammar, **options)


async def answer(rings, caller, chain, session: int = 1, **options: object) -> list[int]:
    await caller.open(session, asked(chain, **options))
    return await caller.finished(session)


@pytest.fixture
async def alone(rings) -> list[int]:
    """The answer that nothing disturbs."""
    await rings.agent("alone", toy())
    caller = await rings.caller("gw-alone")
    return await answer(rings, caller, [("alone", 0, BLOCKS)], gateway="gw-alone")


@pytest.mark.parametrize("size", [1, 3])
async def test_an_answer_matches_its_grammar_and_ends_with_it(rings, alone, size):
    await hosts(rings, RINGS[size])
    caller = await rings.caller()
    tokens = await answer(rings, caller, RINGS[size])
    assert tokens == alone
    assert tokens[-1] == END
    assert FORM.fullmatch(letters_of(tokens[:-1]))
    assert caller.tokens[1][-1].finish_reason == "stop"


async def test_an_answer_that_has_no_room_ends_by_its_length(rings, alone):
    await hosts(rings, RINGS[1])
    caller = await rings.caller()
    assert await answer(rings, caller, RINGS[1], max_tokens=5) == alone[:5]
    assert caller.tokens[1][-1].finish_reason == "length"


async def test_sessions_beside_it_say_what_they_say_alone(rings, alone):
    await hosts(rings, RINGS[3])
    caller = await rings.caller()
    for session in (1, 2, 3, 4):
        grammar = GRAMMAR if session % 2 else ""
        made = asked(RINGS[3], grammar, max_tokens=24 if session % 2 == 0 else 64, ignore_eos=True)
        await caller.open(session, made)
    assert [await caller.finished(session) for session in (1, 3)] == [alone, alone]
    assert [await caller.finished(session) for session in (2, 4)] == [undisturbed(PROMPT, 24)] * 2


@pytest.mark.parametrize("known", [0, 1, 7, 15])
async def test_an_answer_is_started_again_from_its_tokens(rings, alone, known):
    await hosts(rings, OTHER)
    caller = await rings.caller()
    made = asked(OTHER, prompt=[*PROMPT, *alone[:known]], prompt_tokens=len(PROMPT))
    await caller.open(1, made)
    assert await caller.finished(1) == alone[known:]


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("behind", [1, 6, 12])
async def test_an_answer_moves_and_stays_the_same(rings, alone, by_tokens, behind):
    await hosts(rings, RINGS[3], OTHER)
    caller = await rings.caller()
    last = rings.nodes["a-2"].decoders[0]
    last.takes_s = 0.002  # so that it is still going on when it moves
    await caller.open(1, asked(RINGS[3]))
    await caller.wait_for(1, behind)
    await caller.move(1, 2, OTHER, by_tokens=by_tokens)
    assert await caller.ended(2) == alone


async def test_prompts_and_answers_on_two_rings(rings, alone):
    await hosts(rings, RINGS[3], OTHER)
    caller = await rings.caller()
    await caller.open(1, asked(RINGS[3], decode=OTHER))
    assert await caller.finished(1) == alone


async def test_a_grammar_that_compiles_slowly_holds_up_nobody_else(rings, alone):
    node = await rings.agent("a-0")
    may_read = threading.Event()

    def read():
        assert may_read.wait(30)
        return toy_vocabulary()

    node.host(toy(), read)
    await node.settled()
    caller = await rings.caller()
    await caller.open(1, asked(RINGS[1]))
    await caller.open(2, opening(RINGS[1], PROMPT, max_tokens=16))
    assert await caller.finished(2) == undisturbed(PROMPT, 16)
    assert not caller.tokens.get(1)
    may_read.set()
    assert await caller.finished(1) == alone


@pytest.mark.parametrize("grammar", ["start: nothing", 'start: "0123"'])
async def test_a_grammar_that_cannot_be_kept_to_fails_its_own_session(rings, grammar):
    await hosts(rings, RINGS[3])
    caller = await rings.caller()
    await caller.open(1, asked(RINGS[3], grammar))
    await caller.open(2, opening(RINGS[3], PROMPT, max_tokens=8))
    assert await caller.finished(2) == undisturbed(PROMPT, 8)
    failed = await rings.nodes["a-2"].told.wait_for("session_failed")
    assert failed[0].failure.reason in ("INVALID_INPUT", "INTERNAL")
    for node in rings.nodes.values():
        node.generation.close_sessions([1, 2])
    await rings.all_free()


async def test_parameters_that_exclude_each_other_are_the_fault_of_the_caller(rings):
    await hosts(rings, RINGS[3])
    caller = await rings.caller()
    others = [40, 41, 42]  # none of the letters that the grammar begins with
    await caller.open(1, asked(RINGS[3], allowed_token_ids=others))
    failed = await rings.nodes["a-2"].told.wait_for("session_failed")
    assert failed[0].failure.reason == "INVALID_INPUT"
    assert failed[0].failure.message.startswith("allowed_token_ids: leaves no token")


async def test_many_large_grammars_begin_in_one_step(rings, alone):
    await hosts(rings, RINGS[3])
    caller = await rings.caller()
    grammar = f"// {'x' * 60_000}\n{GRAMMAR}"
    first = rings.nodes["a-0"].decoders[0]
    first.gate.clear()  # all of them are there before its first step
    for session in range(1, 25):
        await caller.open(session, asked(RINGS[3], grammar))
    await rings.nodes["a-0"].generation.wait_idle(0.01)
    first.gate.set()
    for session in range(1, 25):
        assert await caller.finished(session) == alone
