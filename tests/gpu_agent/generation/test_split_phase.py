"""A prompt's ring hands its caches to the ring that generates: the answer is that of one ring."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from catenary_agent.engine.engine import EngineLimits
from catenary_agent.generation.context import CacheLimits
from catenary_protos.catenary.v1 import frame_pb2
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS
from tests.support.ring_harness import (
    END,
    HIDDEN,
    VOCABULARY,
    opening,
    opening_frame,
    toy,
    undisturbed,
)

PROMPT = [(7 * i * i + 5 * i + 3) % 48 for i in range(37)]

CUTS = {
    "1 to 1": ([(0, 6)], [(0, 6)]),
    "2 to 1": ([(0, 2), (2, 6)], [(0, 6)]),
    "1 to 2": ([(0, 6)], [(0, 4), (4, 6)]),
    "2 to 2, cut alike": ([(0, 3), (3, 6)], [(0, 3), (3, 6)]),
    "2 to 3": ([(0, 3), (3, 6)], [(0, 1), (1, 4), (4, 6)]),
    "3 to 2": ([(0, 1), (1, 5), (5, 6)], [(0, 2), (2, 6)]),
}


def spans(prefix: str, cuts):
    return [(f"{prefix}-{index}", *cut) for index, cut in enumerate(cuts)]


async def rings_of(rings, cut: str, *, chunk: int = 8, **options):
    prefill, decode = (spans(p, c) for p, c in zip("pd", CUTS[cut], strict=True))
    nodes = {
        agent: await rings.agent(agent, toy(first, last), chunk=chunk, **options)
        for agent, first, last in (*prefill, *decode)
    }
    return prefill, decode, nodes


def close_in_the_middle(nodes, decode, *sessions: int) -> None:
    """What the scheduler orders when a session is over."""
    for agent, _, _ in decode[1:-1]:
        nodes[agent].generation.close_sessions(sessions)


@pytest.mark.parametrize("cut", CUTS)
async def test_a_handed_over_session_says_what_one_whole_model_does(rings, cut):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, cut)
    for session in (1, 2, 3):
        made = opening(prefill, PROMPT[session:], max_tokens=12, decode=decode)
        await caller.open(session, made)
    for session in (1, 2, 3):
        assert await caller.finished(session) == undisturbed(PROMPT[session:], 12)
    close_in_the_middle(nodes, decode, 1, 2, 3)
    await rings.all_free()
    for agent, _, _ in prefill:  # they say so themselves
        closed = nodes[agent].told.of("sessions_closed")
        assert sorted(i for each in closed for i in each.session_ids) == [1, 2, 3]
        steps = nodes[agent].decoders[0].steps
        assert sum(tokens for step in steps for _, _, tokens in step) == sum(
            len(PROMPT[session:]) for session in (1, 2, 3)
        )  # the prompts and not one token more
    for agent, _, _ in decode:
        assert all(n == 1 for step in nodes[agent].decoders[0].steps for _, _, n in step)
        assert nodes[agent].generation.ignored == 0
    assert all(node.told.of("session_failed") == [] for node in nodes.values())


async def test_what_does_not_fit_into_the_window_stays_in_its_slots_until_it_does(rings):
    caller = await rings.caller()
    small = CacheLimits(frame_bytes=96, window_bytes=97)
    prefill, decode, nodes = await rings_of(rings, "2 to 3", caches=small)
    for session in range(1, 6):
        made = opening(prefill, PROMPT, max_tokens=5, decode=decode)
        await caller.open(session, made)
    for session in range(1, 6):
        assert await caller.finished(session) == undisturbed(PROMPT, 5)
    close_in_the_middle(nodes, decode, *range(1, 6))
    await rings.all_free()


async def test_caches_leave_while_the_rest_of_the_prompt_is_computed(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "1 to 1")
    first = nodes["p-0"].decoders[0]
    real = first.step
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()

    def step(items):
        if items[0].position == 32:  # the last chunk of 37 tokens
            first.gate.clear()
            loop.call_soon_threadsafe(reached.set)
        return real(items)

    first.step = step
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    await reached.wait()
    target = nodes["d-0"].decoders[0]
    await until(lambda: target.book.cached.get(1) == 32)
    first.gate.set()
    assert await caller.finished(1) == undisturbed(PROMPT, 5)
    await rings.all_free()


async def test_a_restarted_session_hands_over_prompt_and_answer_so_far(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "2 to 3")
    known = [*PROMPT, *undisturbed(PROMPT, 9)]
    made = opening(prefill, known, prompt_tokens=len(PROMPT), max_tokens=14, decode=decode)
    await caller.open(1, made)
    assert await caller.finished(1) == undisturbed(PROMPT, 14)[9:]
    close_in_the_middle(nodes, decode, 1)
    await rings.all_free()


@pytest.mark.parametrize("cut", ["2 to 1", "2 to 3"])
async def test_an_answer_of_one_token_ends_where_the_prompt_is_run(rings, cut):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, cut)
    await caller.open(1, opening(prefill, PROMPT, max_tokens=1, decode=decode))
    assert await caller.finished(1) == undisturbed(PROMPT, 1)
    await rings.all_free()
    for agent, _, _ in decode:
        assert nodes[agent].node.engine.received_frames == 0


async def test_an_answer_that_ends_with_its_first_token_leaves_nothing_once_closed(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "2 to 3")
    texts = ([a, b, *PROMPT] for a in range(VOCABULARY) for b in range(VOCABULARY))
    prompt = next(text for text in texts if undisturbed(text, 1) == [END])
    made = opening(prefill, prompt, max_tokens=9, decode=decode, ignore_eos=False)
    await caller.open(1, made)
    assert await caller.finished(1) == [END]
    assert caller.tokens[1][-1].finish_reason == "stop"
    for agent, _, _ in prefill:
        await nodes[agent].told.wait_for("sessions_closed")
    for agent, _, _ in decode:
        nodes[agent].generation.close_sessions([1])
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes.values())


@pytest.mark.parametrize("lost", ["d-0", "d-1", "d-2"])
async def test_a_lost_agent_of_the_ring_that_generates_is_named(rings, lost):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "2 to 3", push_timeout_s=0.3)
    await rings.remove(lost)
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    pushing = [agent for agent, first, last in prefill if lost in _gets(decode, first, last)]
    for agent in pushing:
        [failed, *_] = await nodes[agent].told.wait_for("session_failed")
        assert failed.session_id == 1
        assert failed.failure.reason == "PARTITION_LOST"
        assert (failed.failure.agent_id, failed.failure.retryable) == (lost, True)
    for node in rings.nodes.values():  # as the scheduler does
        node.generation.close_sessions([1])
    await rings.all_free()


def _gets(decode, first: int, last: int) -> set[str]:
    return {agent for agent, begin, end in decode if begin < last and first < end}


@pytest.mark.parametrize("lost", ["p-0", "p-1"])
async def test_caches_that_never_come_end_the_wait_and_name_who_owes_them(rings, lost):
    caller = await rings.caller()
    patience = CacheLimits(stall_timeout_ns=SECOND_NS // 3)
    prefill, decode, nodes = await rings_of(rings, "2 to 3", caches=patience)
    gone = nodes[lost].decoders[0]
    real = gone.step

    def step(items):
        if items[0].position >= 16:
            gone.step = real
            gone.gate.clear()
        return real(items)

    gone.step = step
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    await until(lambda: not gone.gate.is_set())
    await until(lambda: nodes["d-1"].generation.sessions == 1)  # which has blocks of both
    await rings.remove(lost)
    [failed, *_] = await nodes["d-1"].told.wait_for("session_failed")
    assert (failed.failure.reason, failed.failure.retryable) == ("PARTITION_LOST", True)
    assert failed.failure.agent_id == lost
    for node in rings.nodes.values():
        node.generation.close_sessions([1])
    await rings.all_free()


@pytest.mark.parametrize("late", [False, True])
async def test_a_session_closed_by_order_in_the_middle_leaves_nothing_anywhere(rings, late):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "2 to 3")
    gate = nodes["p-1"].decoders[0]
    real = gate.step

    def step(items):
        if any(item.session == 1 and item.position >= 16 for item in items):
            gate.gate.clear()
        return real(items)

    gate.step = step
    await caller.open(1, opening(prefill, PROMPT, max_tokens=50, decode=decode))
    await until(lambda: nodes["d-1"].generation.sessions == 1)
    await until(lambda: not gate.gate.is_set())
    for agent, _, _ in decode if late else (*prefill, *decode):
        nodes[agent].generation.close_sessions([1])
    await caller.open(2, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    gate.step = real
    gate.gate.set()
    assert await caller.finished(2) == undisturbed(PROMPT, 5)
    for agent, _, _ in (*prefill, *decode):
        nodes[agent].generation.close_sessions([1, 2])
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes.values())


async def test_a_deadline_ends_the_wait_for_caches(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "1 to 1")
    gate = nodes["p-0"].decoders[0]
    gate.takes_s = 0.03
    made = opening(prefill, PROMPT * 4, max_tokens=5, decode=decode, budget_ns=SECOND_NS // 5)
    await caller.open(1, made)
    [failed] = await nodes["d-0"].told.wait_for("session_failed")
    assert failed.failure.reason == "DEADLINE_EXCEEDED"
    await nodes["p-0"].told.wait_for("session_failed")
    await rings.all_free()


async def test_an_executor_that_fails_to_take_rows_fails_the_session_only(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "1 to 1")
    target = nodes["d-0"].decoders[0]
    target.fails = RuntimeError("broken")
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    [failed] = await nodes["d-0"].told.wait_for("session_failed")
    assert failed.failure.reason == "INTERNAL"
    assert "incident" in failed.failure.message
    target.fails = None
    await caller.open(2, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    assert await caller.finished(2) == undisturbed(PROMPT, 5)
    nodes["p-0"].generation.close_sessions([1])
    await rings.all_free()


def cache_frame(session_id: int, span: tuple[int, int, int, int], datatype: str = "FP32", **more):
    first_block, last_block, first_token, last_token = span
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_CACHE,
        epoch=1,
        cache=frame_pb2.SessionCache(
            session_id=session_id,
            first_block=first_block,
            last_block=last_block,
            first_token=first_token,
            last_token=last_token,
            datatype=datatype,
            **more,
        ),
    )


def rows_of(blocks: int, tokens: int) -> np.ndarray:
    return np.zeros((blocks * 2 * tokens, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("frame", "rows"),
    [
        (cache_frame(1, (0, 6, 1, 3)), rows_of(6, 2)),  # a gap
        (cache_frame(1, (0, 7, 0, 3)), rows_of(7, 3)),  # a block too many
        (cache_frame(1, (0, 6, 0, 38)), rows_of(6, 38)),  # a token too many
        (cache_frame(1, (0, 6, 0, 3)), rows_of(6, 2)),  # fewer bytes than it says
        (cache_frame(1, (0, 6, 0, 3), "INT8"), rows_of(6, 3)),
        (cache_frame(1, (0, 6, 0, 0)), None),
    ],
)
async def test_a_wrong_part_of_a_cache_fails_its_session_only(rings, frame, rows):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "1 to 1")
    made = opening(prefill, PROMPT, max_tokens=5, decode=decode)
    introduction = opening_frame(1, made)
    await caller.peer.send("d-0", introduction)
    await caller.peer.send("d-0", frame, **({} if rows is None else {"rows": rows}))
    [failed] = await nodes["d-0"].told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (1, "INVALID_INPUT")
    await caller.open(2, made)
    assert await caller.finished(2) == undisturbed(PROMPT, 5)
    await rings.all_free()


async def test_caches_of_sessions_nobody_knows_are_ignored(rings):
    caller = await rings.caller()
    _, _, nodes = await rings_of(rings, "1 to 1")
    for session in (5, 6):
        await caller.peer.send("d-0", cache_frame(session, (0, 6, 0, 2)), rows=rows_of(6, 2))
    await until(lambda: nodes["d-0"].generation.ignored == 2)
    await rings.all_free()
    assert nodes["d-0"].told.of("session_failed") == []


@pytest.mark.parametrize(
    ("ring", "decode", "says"),
    [
        ([("p-0", 0, 6)], [("p-0", 0, 6)], "passes"),
        ([("p-0", 0, 6)], [("d-0", 0, 5)], "decode_route"),
        ([("p-0", 0, 6)], [("d-0", 1, 6)], "decode_route"),
        ([("p-0", 0, 6)], [("d-0", 0, 3), ("d-1", 4, 6)], "decode_route"),
    ],
)
async def test_rings_that_do_not_fit_each_other_are_refused(rings, ring, decode, says):
    caller = await rings.caller()
    node = await rings.agent("p-0", toy())
    await caller.open(1, opening(ring, PROMPT, decode=decode))
    [failed] = await node.told.wait_for("session_failed")
    assert failed.failure.reason == "INVALID_INPUT"
    assert says in failed.failure.message
    await rings.all_free()


async def test_a_hello_names_the_ring_an_agent_is_on(rings):
    caller = await rings.caller()
    prefill, decode, nodes = await rings_of(rings, "2 to 3")
    await caller.open(1, opening(prefill, PROMPT, max_tokens=60, decode=decode))
    await caller.wait_for(1, 3)
    for agent, _, _ in decode:
        [held] = nodes[agent].generation.snapshot()
        assert [hop.agent_id for hop in held.route] == [agent for agent, _, _ in decode]
    await caller.finished(1)
    close_in_the_middle(nodes, decode, 1)
    await rings.all_free()


async def test_caches_an_agent_has_no_memory_for_fail_their_session_for_another_try(rings):
    caller = await rings.caller()
    prefill, decode = spans("p", [(0, 6)]), spans("d", [(0, 6)])
    await rings.agent("p-0", toy(), chunk=8)
    full = await rings.agent("d-0", toy(), chunk=8, engine_limits=EngineLimits(max_held_bytes=64))
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    [failed, *_] = await full.told.wait_for("session_failed")
    assert (failed.failure.reason, failed.failure.retryable) == ("OVERLOADED", True)
    for node in rings.nodes.values():
        node.generation.close_sessions([1])
    await rings.all_free()
