from __future__ import annotations

import asyncio

import pytest

from shared_helpers.waiting import until
from tests.support.agent_harness import entered
from tests.support.ring_harness import (
    BLOCKS,
    END,
    opening,
    opening_frame,
    toy,
    undisturbed,
)

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]

RINGS = {
    1: [("a-0", 0, BLOCKS)],
    2: [("a-0", 0, 2), ("a-1", 2, BLOCKS)],
    3: [("a-0", 0, 1), ("a-1", 1, 4), ("a-2", 4, BLOCKS)],
}


async def ring_of(rings, size: int, **options):
    return [
        await rings.agent(agent, toy(first, last), **options) for agent, first, last in RINGS[size]
    ]


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [(number * 7 + i * i * 3 + i) % 48 for i in range(length)]


def close_in_the_middle(nodes, *sessions: int) -> None:
    """What the scheduler orders when a session is over: the ends of the ring know it already."""
    for node in nodes[1:-1]:
        node.generation.close_sessions(sessions)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_ring_generates_what_one_whole_model_does(rings, size):
    caller = await rings.caller()
    nodes = await ring_of(rings, size)
    await caller.open(1, opening(RINGS[size], PROMPT, max_tokens=12))
    assert await caller.finished(1) == undisturbed(PROMPT, 12)
    assert caller.tokens[1][-1].finish_reason == "length"
    for node in {id(each): each for each in (nodes[0], nodes[-1])}.values():
        [closed] = await node.told.wait_for("sessions_closed")
        assert list(closed.session_ids) == [1]
    close_in_the_middle(nodes, 1)
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_sessions_join_and_leave_between_steps_without_touching_each_other(rings, size):
    caller = await rings.caller()
    nodes = await ring_of(rings, size, chunk=5)
    lengths = {1: 30, 2: 3, 3: 17, 4: 9, 5: 24, 6: 1}
    await caller.open(1, opening(RINGS[size], prompt_of(1), max_tokens=lengths[1]))
    await caller.wait_for(1, 3)
    for session in (2, 3, 4, 5, 6):
        made = opening(RINGS[size], prompt_of(session, 3 * session), max_tokens=lengths[session])
        await caller.open(session, made)
    for session, count in lengths.items():
        prompt = prompt_of(session, 3 * session) if session > 1 else prompt_of(1)
        assert await caller.finished(session) == undisturbed(prompt, count)
    close_in_the_middle(nodes, *lengths)
    await rings.all_free()
    last = nodes[-1].decoders[0]
    assert max(len(step) for step in last.steps) > 1  # they did share steps


async def test_sessions_that_enter_in_the_middle_share_the_passes_behind(rings):
    caller = await rings.caller()
    await rings.agent("a-0", toy(0, 2))
    await rings.agent("a-1", toy(0, 4))
    shared = await rings.agent("a-2", toy(1, BLOCKS, 2, 4))
    decoder = shared.decoders[0]
    decoder.gate.clear()
    chains = {
        3: [("a-3", 0, 1), ("a-2", 1, BLOCKS)],  # computes while the other two come
        1: [("a-0", 0, 2), ("a-2", 2, BLOCKS)],
        2: [("a-1", 0, 4), ("a-2", 4, BLOCKS)],
    }
    await rings.agent("a-3", toy(0, 1))
    for session, ring in chains.items():
        await caller.open(session, opening(ring, prompt_of(session), max_tokens=10))
        if session == 3:
            await entered(decoder)
    await until(lambda: shared.generation.sessions == 3)
    decoder.gate.set()
    for session in chains:
        assert await caller.finished(session) == undisturbed(prompt_of(session), 10)
    assert any({1, 2} <= {item[0] for item in step} for step in decoder.steps)
    await rings.all_free()


@pytest.mark.parametrize("size", [1, 2])
async def test_a_prompt_goes_in_chunks_and_does_not_hold_up_the_others(rings, size):
    caller = await rings.caller()
    nodes = await ring_of(rings, size, chunk=8)
    first = nodes[0].decoders[0]
    real, joined = first.step, asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(items):
        if not joined.is_set() and any(i.session == 3 and i.position > 8 for i in items):
            first.gate.clear()  # the three decode, and wait for the fourth to come
            loop.call_soon_threadsafe(joined.set)
        return real(items)

    first.step = step
    first.gate.clear()
    for session in (1, 2, 3):
        await caller.open(session, opening(RINGS[size], prompt_of(session), max_tokens=400))
    await until(lambda: nodes[0].generation.sessions == 3)
    first.gate.set()
    await joined.wait()
    await caller.open(9, opening(RINGS[size], prompt_of(9, 101), max_tokens=5))
    await until(lambda: nodes[0].generation.sessions == 4)
    first.gate.set()
    assert await caller.finished(9) == undisturbed(prompt_of(9, 101), 5)
    for session in (1, 2, 3):
        assert await caller.finished(session) == undisturbed(prompt_of(session), 400)
    for node in nodes:
        steps = node.decoders[0].steps
        for step in steps:
            assert sum(tokens for _, _, tokens in step if tokens > 1) <= 8
        with_prompt = [step for step in steps if any(s == 9 and n > 1 for s, _, n in step)]
        assert len(with_prompt) >= 12
        if size == 1:  # the others are ready again after every step: each of them takes part
            assert all(len(step) == 4 for step in with_prompt)
    await rings.all_free()


async def test_prompts_are_read_one_after_the_other(rings):
    caller = await rings.caller()
    [node] = await ring_of(rings, 1, chunk=4)
    decoder = node.decoders[0]
    decoder.gate.clear()
    for session in (1, 2, 3):
        await caller.open(session, opening(RINGS[1], prompt_of(session, 16), max_tokens=2))
    await until(lambda: node.generation.sessions == 3)
    decoder.gate.set()
    for session in (1, 2, 3):
        assert await caller.finished(session) == undisturbed(prompt_of(session, 16), 2)
    order = [item[0] for step in decoder.steps for item in step if item[2] > 1]
    assert order == sorted(order)
    assert set(order) == {1, 2, 3}
    await rings.all_free()


async def test_an_end_of_text_token_stops_unless_it_is_to_be_ignored(rings):
    caller = await rings.caller()
    await ring_of(rings, 2)
    prompt = next(
        p for p in (prompt_of(n) for n in range(500)) if 2 < len(undisturbed(p, 40, ends=True)) < 40
    )
    expected = undisturbed(prompt, 40, ends=True)
    await caller.open(1, opening(RINGS[2], prompt, max_tokens=40, ignore_eos=False))
    assert await caller.finished(1) == expected
    assert expected[-1] == END
    assert caller.tokens[1][-1].finish_reason == "stop"
    await caller.open(2, opening(RINGS[2], prompt, max_tokens=40))
    assert await caller.finished(2) == undisturbed(prompt, 40)
    await rings.all_free()


async def test_a_session_ends_where_its_room_ends(rings):
    caller = await rings.caller()
    await rings.agent("a-0", toy(tokens=20))
    await caller.open(1, opening(RINGS[1], PROMPT, max_tokens=0))
    assert await caller.finished(1) == undisturbed(PROMPT, 12)
    assert caller.tokens[1][-1].finish_reason == "length"
    await rings.all_free()


async def test_a_session_goes_on_elsewhere_as_if_nothing_was(rings):
    caller = await rings.caller()
    await ring_of(rings, 2)
    sampling = {"temperature": 1.0, "seed": 42, "repetition_penalty": 1.3}
    await caller.open(1, opening(RINGS[2], PROMPT, max_tokens=30, **sampling))
    whole = await caller.finished(1)
    known = PROMPT + whole[:11]
    made = opening(RINGS[2], known, max_tokens=30, prompt_tokens=len(PROMPT), **sampling)
    await caller.open(2, made)
    assert await caller.finished(2) == whole[11:]
    assert caller.tokens[2][0].position == len(known)
    await rings.all_free()


async def test_a_close_order_frees_before_the_next_step_and_is_always_answered(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, 2)
    for session in (1, 2):
        await caller.open(session, opening(RINGS[2], prompt_of(session), max_tokens=300))
        await caller.wait_for(session, 2)
    decoder = nodes[1].decoders[0]
    decoder.gate.clear()
    decoder.entered.clear()
    await entered(decoder)
    for node in nodes:
        node.generation.close_sessions([1, 77])
    decoder.gate.set()
    for node in nodes:
        [closed] = await node.told.wait_for("sessions_closed")
        assert list(closed.session_ids) == [1, 77]
    running = len(decoder.steps)
    await caller.finished(2)
    assert all(item[0] != 1 for step in decoder.steps[running + 1 :] for item in step)
    await rings.all_free()
    await caller.open(1, opening(RINGS[2], prompt_of(1), max_tokens=3))  # too late: it was closed
    await until(lambda: nodes[0].generation.ignored > 0)
    assert nodes[0].generation.sessions == 0


async def test_every_token_says_where_its_time_went_if_asked(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, 3)
    await caller.open(1, opening(RINGS[3], PROMPT, max_tokens=4, timed=True))
    await caller.finished(1)
    for token in caller.tokens[1]:
        assert [timing.agent_id for timing in token.timings] == ["a-0", "a-1", "a-2"]
        assert [timing.first_block for timing in token.timings] == [0, 1, 4]
        assert all(timing.compute_ns > 0 and timing.transfer_ns > 0 for timing in token.timings)
    close_in_the_middle(nodes, 1)
    await rings.all_free()


async def test_tokens_go_out_while_the_next_step_computes(rings):
    caller = await rings.caller()
    [node] = await ring_of(rings, 1)
    decoder = node.decoders[0]
    real = decoder.step
    held = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(items):
        if items[0].position == len(PROMPT) + 3:
            decoder.gate.clear()
            loop.call_soon_threadsafe(held.set)
        return real(items)

    decoder.step = step
    await caller.open(1, opening(RINGS[1], PROMPT, max_tokens=10))
    await held.wait()
    assert len(await caller.wait_for(1, 4)) == 4  # while the fifth is computed
    decoder.gate.set()
    assert await caller.finished(1) == undisturbed(PROMPT, 10)
    await rings.all_free()


async def test_an_opening_sent_twice_begins_one_session(rings):
    caller = await rings.caller()
    [node] = await ring_of(rings, 1)
    node.decoders[0].gate.clear()
    made = opening(RINGS[1], PROMPT, max_tokens=6)
    await caller.open(1, made)
    await caller.peer.send("a-0", opening_frame(1, made))
    await until(lambda: node.node.engine.received_frames == 2)
    node.decoders[0].gate.set()
    assert await caller.finished(1) == undisturbed(PROMPT, 6)
    assert node.generation.ignored == 1
    await rings.all_free()
