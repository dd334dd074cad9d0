from __future__ import annotations

import asyncio

import numpy as np
import pytest

from catenary_agent.engine.engine import EngineLimits
from catenary_protos.catenary.v1 import frame_pb2, generation_pb2
from catenary_services.errors import PartitionLost
from catenary_services.transport.interface import Capabilities
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS, entered
from tests.support.ring_harness import BLOCKS, HIDDEN, opening, opening_frame, toy, undisturbed

PROMPT = [3, 14, 15, 9, 26]
ONE = [("a-0", 0, BLOCKS)]
TWO = [("a-0", 0, 2), ("a-1", 2, BLOCKS)]
THREE = [("a-0", 0, 1), ("a-1", 1, 4), ("a-2", 4, BLOCKS)]


async def ring_of(rings, ring, **options):
    return [await rings.agent(agent, toy(first, last), **options) for agent, first, last in ring]


def step_frame(session_id: int, position: int, rows: np.ndarray | None, **entry):
    tokens = 0 if rows is None else len(rows)
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_STEP,
        epoch=1,
        session_rows=[
            frame_pb2.SessionRows(session_id=session_id, position=position, tokens=tokens, **entry)
        ],
    )


def hidden(tokens: int, width: int = HIDDEN) -> np.ndarray:
    return np.ones((tokens, width), np.float32)


def _changed(**changes):
    made = opening(ONE, PROMPT)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def _hop(**changes):
    made = opening(ONE, PROMPT)
    for name, value in changes.items():
        setattr(made.route[0], name, value)
    return made


BIAS = generation_pb2.TokenBias(token_id=50, bias=1.0)


@pytest.mark.parametrize(
    ("made", "reason", "says"),
    [
        (opening([], PROMPT), "INVALID_INPUT", "route"),
        (opening([("a-9", 0, 6)], PROMPT), "INVALID_INPUT", "route"),
        (opening([*ONE, *ONE], PROMPT), "INVALID_INPUT", "route"),
        (opening([("a-0", 0, 6), ("a-1", 6, 7)], PROMPT), "INVALID_INPUT", "route"),
        (_hop(model="other"), "PARTITION_LOST", "not loaded"),
        (_hop(last_block=5), "PARTITION_LOST", "not loaded"),
        (_hop(first_block=3), "PARTITION_LOST", "not loaded"),
        (opening(ONE, []), "INVALID_INPUT", "prompt_tokens"),
        (_changed(prompt_tokens=6), "INVALID_INPUT", "prompt_tokens"),
        (_changed(budget_ns=0), "DEADLINE_EXCEEDED", "deadline"),
        (opening(ONE, [1, 50]), "INVALID_INPUT", "vocabulary"),
        (opening(ONE, [1] * 512), "INVALID_INPUT", "512"),
        (opening(ONE, [1] * 9, prompt_tokens=1, max_tokens=8), "INVALID_INPUT", "max_tokens"),
        (opening(ONE, PROMPT, temperature=float("nan")), "INVALID_INPUT", "temperature"),
        (opening(ONE, PROMPT, min_p=1.5), "INVALID_INPUT", "min_p"),
        (opening(ONE, PROMPT, logit_bias=[BIAS]), "INVALID_INPUT", "logit_bias"),
    ],
)
async def test_a_wrong_opening_fails_its_session_and_no_other(rings, made, reason, says):
    caller = await rings.caller()
    [node] = await ring_of(rings, ONE)
    frame = opening_frame(1, made)
    frame.session_rows.extend(opening_frame(2, opening(ONE, PROMPT, max_tokens=4)).session_rows)
    caller._starts[2] = len(PROMPT)
    await caller.peer.send("a-0", frame)
    [failed] = await node.told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (1, reason)
    assert says in failed.failure.message
    assert failed.failure.retryable == (reason == "PARTITION_LOST")
    assert list(node.told.of("sessions_closed")[0].session_ids) == [1]
    assert await caller.finished(2) == undisturbed(PROMPT, 4)
    await rings.all_free()


async def test_sessions_of_a_former_leader_may_go_on_but_not_begin(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    await caller.open(1, opening(TWO, PROMPT, max_tokens=100), epoch=3)
    await caller.wait_for(1, 2)
    for node in nodes:
        node.generation.raise_epoch(4)
    await caller.open(2, opening(TWO, PROMPT), epoch=3)
    [failed] = await nodes[0].told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (2, "STALE_EPOCH")
    assert failed.failure.retryable
    assert await caller.finished(1) == undisturbed(PROMPT, 100)
    await rings.all_free()


async def test_a_session_too_many_is_refused_and_costs_nobody_a_slot(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy(slots=BLOCKS * 2 + 1))
    node.decoders[0].gate.clear()
    for session in (1, 2, 3):
        await caller.open(session, opening(ONE, PROMPT, max_tokens=20))
    node.decoders[0].gate.set()
    [failed] = await node.told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (3, "OVERLOADED")
    assert failed.failure.retryable
    for session in (1, 2):
        assert await caller.finished(session) == undisturbed(PROMPT, 20)
    await rings.all_free()


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (lambda at: step_frame(1, at + 1, hidden(1)), hidden(1)),
        (lambda at: step_frame(1, 0, hidden(1)), hidden(1)),
        (lambda at: step_frame(1, at, hidden(1, 5)), hidden(1, 5)),
        (lambda at: step_frame(1, at, hidden(600)), hidden(600)),
        (lambda at: step_frame(1, at, hidden(3)), np.ones(4, np.float32)),
    ],
)
async def test_rows_with_a_gap_a_repetition_or_nonsense_fail_their_session_only(
    rings, frame, payload
):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    decoder = nodes[1].decoders[0]
    for session in (1, 2):
        await caller.open(session, opening(TWO, PROMPT, max_tokens=60))
        await caller.wait_for(session, 1)
    decoder.gate.clear()
    decoder.entered.clear()
    await entered(decoder)
    await caller.peer.send("a-1", frame(200), rows=payload)
    await until(lambda: nodes[1].node.engine.received_frames > 0)
    decoder.gate.set()
    [failed] = await nodes[1].told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (1, "INVALID_INPUT")
    nodes[0].generation.close_sessions([1])  # as the scheduler does
    assert await caller.finished(2) == undisturbed(PROMPT, 60)
    await rings.all_free()
    assert len(nodes[1].told.of("session_failed")) == 1


@pytest.mark.parametrize(("position", "token"), [(99, 1), (0, 1), (None, 50)])
async def test_a_token_out_of_turn_fails_its_session_only(rings, position, token):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    for node in nodes:
        node.decoders[0].gate.clear()
    for session in (1, 2):
        await caller.open(session, opening(TWO, PROMPT, max_tokens=10))
    nodes[0].decoders[0].gate.set()
    await until(lambda: len(nodes[0].decoders[0].steps) > 0)
    await caller.peer.send(
        "a-0",
        frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_SESSION_TOKENS,
            session_tokens=[
                frame_pb2.SessionToken(
                    session_id=1,
                    position=len(PROMPT) if position is None else position,
                    token_id=token,
                )
            ],
        ),
    )
    [failed] = await nodes[0].told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (1, "INVALID_INPUT")
    nodes[1].generation.close_sessions([1])
    nodes[1].decoders[0].gate.set()
    assert await caller.finished(2) == undisturbed(PROMPT, 10)
    await rings.all_free()


async def test_frames_of_unknown_and_of_closed_sessions_are_ignored(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    await caller.open(1, opening(TWO, PROMPT, max_tokens=3))
    await caller.finished(1)
    await rings.all_free()
    for session in (1, 5):
        await caller.peer.send("a-1", step_frame(session, 0, hidden(2)), rows=hidden(2))
        await caller.peer.send(
            "a-0",
            frame_pb2.FrameHeader(
                kind=frame_pb2.FRAME_KIND_SESSION_TOKENS,
                session_tokens=[frame_pb2.SessionToken(session_id=session, position=9)],
            ),
        )
    reopened = step_frame(1, 0, hidden(2), opening=opening(TWO, PROMPT))
    await caller.peer.send("a-1", reopened, rows=hidden(2))
    await until(lambda: nodes[1].generation.ignored == 4 and nodes[0].generation.ignored == 2)
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes)


async def test_a_deadline_ends_a_session_that_waits_and_one_that_works(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    nodes[1].decoders[0].gate.clear()
    await caller.open(1, opening(TWO, PROMPT, budget_ns=SECOND_NS // 5))
    [failed] = await nodes[0].told.wait_for("session_failed")  # it waits for a token
    assert failed.failure.reason == "DEADLINE_EXCEEDED"
    assert not failed.failure.retryable
    nodes[1].decoders[0].gate.set()
    [failed] = await nodes[1].told.wait_for("session_failed")
    assert failed.failure.reason == "DEADLINE_EXCEEDED"
    await rings.all_free()


async def test_a_session_that_makes_steps_fail_fails_alone(rings):
    caller = await rings.caller()
    [node] = await ring_of(rings, ONE)
    decoder = node.decoders[0]
    step = decoder.step

    def poisoned(items):
        if any(item.session == 2 for item in items):
            raise RuntimeError("index out of range")
        return step(items)

    decoder.step = poisoned
    for session in (1, 2, 3):
        await caller.open(session, opening(ONE, PROMPT, max_tokens=9))
    [failed] = await node.told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.reason) == (2, "DEVICE_FAILED")
    for session in (1, 3):
        assert await caller.finished(session) == undisturbed(PROMPT, 9)
    await rings.all_free()


async def test_a_step_too_large_for_the_memory_is_done_in_parts(rings):
    caller = await rings.caller()
    [node] = await ring_of(rings, ONE)
    decoder = node.decoders[0]
    step = decoder.step

    def small(items):
        if len(items) > 1:
            raise MemoryError
        return step(items)

    decoder.step = small
    for session in (1, 2):
        await caller.open(session, opening(ONE, PROMPT, max_tokens=9))
    for session in (1, 2):
        assert await caller.finished(session) == undisturbed(PROMPT, 9)
    await rings.all_free()


async def test_an_executor_that_raises_costs_the_sessions_of_that_step_and_tells_nothing(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    decoder = nodes[1].decoders[0]
    for session in (1, 2):
        await caller.open(session, opening(TWO, PROMPT, max_tokens=400))
        await caller.wait_for(session, 2)
    decoder.fails = RuntimeError("secret weights")
    failures = await nodes[1].told.wait_for("session_failed", 2)
    assert {each.session_id for each in failures} == {1, 2}
    for each in failures:
        assert each.failure.reason == "DEVICE_FAILED"
        assert "secret" not in each.failure.message
    decoder.fails = None
    nodes[0].generation.close_sessions([1, 2])
    await caller.open(3, opening(TWO, PROMPT, max_tokens=5))
    assert await caller.finished(3) == undisturbed(PROMPT, 5)
    await rings.all_free()


@pytest.mark.parametrize("lost", ["a-1", "a-2"])
async def test_a_lost_agent_fails_what_is_on_the_way_to_it_and_is_named(rings, lost):
    # What it had taken already is lost with it: that is for the scheduler to notice.
    caller = await rings.caller()
    nodes = await ring_of(rings, THREE)
    whole = toy()
    nodes[0].host(whole)
    before = nodes[1] if lost == "a-2" else nodes[0]
    await caller.open(1, opening(THREE, PROMPT, max_tokens=400))
    await caller.wait_for(1, 2)
    before.decoders[0].gate.clear()
    before.decoders[0].entered.clear()
    await entered(before.decoders[0])
    await caller.open(3, opening(ONE, PROMPT, max_tokens=400))
    await rings.remove(lost)
    before.decoders[0].gate.set()
    [failed] = await before.told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.agent_id) == (1, lost)
    assert (failed.failure.reason, failed.failure.retryable) == ("PARTITION_LOST", True)
    for node in rings.nodes.values():
        node.generation.close_sessions([1])
    assert await caller.finished(3) == undisturbed(PROMPT, 400)
    await rings.all_free()


@pytest.mark.parametrize(
    ("cut", "target"), [("a-0", "a-1"), ("a-2", "a-0")], ids=["rows", "tokens"]
)
async def test_what_left_over_a_link_that_broke_fails_with_the_peer_named(rings, cut, target):
    """The kernel took the frame, and nobody ever acknowledged it."""
    caller = await rings.caller()
    await ring_of(rings, THREE)
    sender = rings.nodes[cut]
    link_to, losses = sender.node.hub.link_to, []

    class Silent:
        capabilities, closed = Capabilities("tcp", same_host=False), False

        def __init__(self, link):
            self.export = link.export

        async def push(self, slot, header, timeout_s, lost_frame):
            losses.append(lost_frame)

        def transit(self):
            return None

    async def silent(peer_id, timeout_s):
        link = await link_to(peer_id, timeout_s)
        return Silent(link) if peer_id == target else link

    sender.node.hub.link_to = silent
    for session in (1, 2):
        await caller.open(session, opening(THREE, PROMPT, max_tokens=8))
        await until(lambda sent=session: len(losses) == sent)
    for lost in losses:
        lost(PartitionLost("tcp link lost: nothing was acknowledged for 4 s"))
    failures = await sender.told.wait_for("session_failed", 2)
    assert {each.session_id for each in failures} == {1, 2}
    for each in failures:
        assert (each.failure.reason, each.failure.agent_id) == ("PARTITION_LOST", target)
        assert each.failure.retryable
    sender.node.hub.link_to = link_to
    sender.generation._peers._links.clear()
    for node in rings.nodes.values():
        node.generation.close_sessions([1, 2])
    await caller.open(3, opening(THREE, PROMPT, max_tokens=5))
    assert await caller.finished(3) == undisturbed(PROMPT, 5)
    for node in rings.nodes.values():
        node.generation.close_sessions([3])
    await rings.all_free()


async def test_a_lost_gateway_fails_its_sessions_and_not_those_of_others(rings):
    gone, caller = await rings.caller("gw-gone"), await rings.caller()
    nodes = await ring_of(rings, TWO)
    await gone.open(1, opening(TWO, PROMPT, max_tokens=500, gateway="gw-gone"))
    await caller.open(2, opening(TWO, PROMPT, max_tokens=300))
    await gone.wait_for(1, 2)
    await rings.net.remove("gw-gone")
    failed, *_ = await nodes[1].told.wait_for("session_failed")
    assert (failed.session_id, failed.failure.agent_id) == (1, "gw-gone")
    for node in nodes:
        node.generation.close_sessions([1])
    assert await caller.finished(2) == undisturbed(PROMPT, 300)
    await rings.all_free()


async def test_rows_beyond_the_bytes_an_agent_may_hold_are_refused(rings):
    caller = await rings.caller()
    limits = EngineLimits(max_held_bytes=64 * HIDDEN * 4)
    first = await rings.agent("a-0", toy(0, 2), chunk=32)
    second = await rings.agent("a-1", toy(2, BLOCKS), engine_limits=limits)
    second.decoders[0].gate.clear()
    await caller.open(1, opening(TWO, [1] * 200))
    await until(lambda: second.node.engine.received_frames == 7)
    second.decoders[0].gate.set()
    [failed] = await second.told.wait_for("session_failed")
    assert (failed.failure.reason, failed.failure.retryable) == ("OVERLOADED", True)
    first.generation.close_sessions([1])
    await caller.open(2, opening(TWO, PROMPT, max_tokens=3))
    assert await caller.finished(2) == undisturbed(PROMPT, 3)
    await rings.all_free()


async def test_frames_that_wait_for_a_slow_peer_are_bounded(rings):
    caller = await rings.caller()
    first = await rings.agent(
        "a-0", toy(0, 2), chunk=8, max_waiting_bytes=40 * HIDDEN * 4, push_timeout_s=20.0
    )
    await rings.agent("a-1", toy(2, BLOCKS))
    link_to, may_connect = first.node.hub.link_to, asyncio.Event()

    async def slow(peer_id, timeout_s):
        await may_connect.wait()
        return await link_to(peer_id, timeout_s)

    first.node.hub.link_to = slow
    await caller.open(1, opening(TWO, [1] * 200))
    failed, *_ = await first.told.wait_for("session_failed")
    assert (failed.failure.reason, failed.failure.agent_id) == ("OVERLOADED", "a-1")
    may_connect.set()
    for node in rings.nodes.values():
        node.generation.close_sessions([1])
    await rings.all_free()


async def test_close_gives_everything_back_in_the_middle_of_work(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, TWO)
    for session in range(1, 6):
        await caller.open(session, opening(TWO, PROMPT, max_tokens=400))
        await caller.wait_for(session, 1)
    for node in nodes:
        await node.generation.close()
        assert node.generation.sessions == 0
        assert node.node.engine.held_bytes == 0
        assert node.decoders[0].closed
        assert node.decoders[0].sessions == 0


async def test_a_bug_of_ours_is_not_swallowed(rings):
    await rings.caller()
    [node] = await ring_of(rings, ONE)
    node.generation._thread.post(object())  # matches no event: nothing happens
    await node.settled()
    node.generation._generation_loop.sessions.batchers.append(None)
    node.generation.close_sessions([1])
    with pytest.raises(AttributeError):
        async with asyncio.timeout(30):
            await node.generation.failed()
    node.generation._generation_loop.sessions.batchers.pop()


async def test_what_goes_wrong_around_a_step_costs_one_session(rings, monkeypatch):
    caller = await rings.caller()
    [node] = await ring_of(rings, ONE)
    decoder = node.decoders[0]
    real_open, real_choose = decoder.open_session, decoder.chooser.choose

    def open_session(session, entry_block, tokens=0):
        real_open(session, entry_block, tokens)
        if session == 1:
            raise OSError("no memory")

    def choose(logits, asked, rows):
        if any(sampler.position == len(PROMPT) + 4 for _, sampler in asked):
            raise FloatingPointError("of session 2")
        return real_choose(logits, asked, rows)

    decoder.open_session = open_session
    monkeypatch.setattr(decoder.chooser, "choose", choose)
    await caller.open(1, opening(ONE, PROMPT))
    await caller.open(2, opening(ONE, [*PROMPT, 1], max_tokens=9))
    await caller.open(3, opening(ONE, PROMPT, max_tokens=3))
    failures = await node.told.wait_for("session_failed", 2)
    assert {(each.session_id, each.failure.reason) for each in failures} == {
        (1, "INTERNAL"),
        (2, "INTERNAL"),
    }
    assert await caller.finished(3) == undisturbed(PROMPT, 3)
    await rings.all_free()
