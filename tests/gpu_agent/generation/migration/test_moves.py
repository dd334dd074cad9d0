"""Live migration over real transports: a session goes on elsewhere, and says what it would have."""

from __future__ import annotations

import asyncio

import pytest

from catenary_agent.generation.context import CacheLimits
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS
from tests.support.ring_harness import opening, toy, undisturbed

PROMPT = [(7 * i * i + 5 * i + 3) % 48 for i in range(37)]
TOKENS = 40

CUTS = {
    "1 to 1": ([(0, 6)], [(0, 6)]),
    "3 to 2, cut otherwise": ([(0, 1), (1, 5), (5, 6)], [(0, 2), (2, 6)]),
    "2 to 3": ([(0, 3), (3, 6)], [(0, 1), (1, 4), (4, 6)]),
}
MODES = {"kv": False, "tokens": True}
BOTH = ["kv", pytest.param("tokens", marks=pytest.mark.system)]
WAYS = [
    ("1 to 1", "kv"),
    ("3 to 2, cut otherwise", "kv"),
    ("2 to 3", "tokens"),
    pytest.param("1 to 1", "tokens", marks=pytest.mark.system),
    pytest.param("3 to 2, cut otherwise", "tokens", marks=pytest.mark.system),
    pytest.param("2 to 3", "kv", marks=pytest.mark.system),
]


def spans(prefix: str, cuts):
    return [(f"{prefix}-{index}", *cut) for index, cut in enumerate(cuts)]


async def agents_of(rings, *chains, chunk: int = 8, takes_s: float = 0.005, **options):
    """Returns agents that take a little time for each step, as a device does."""
    nodes = {}
    for agent, first, last in (hop for chain in chains for hop in chain):
        if agent not in nodes:
            nodes[agent] = await rings.agent(agent, toy(first, last), chunk=chunk, **options)
            nodes[agent].decoders[0].takes_s = takes_s
    return nodes


async def two_rings(rings, cut: str, **options):
    old, new = (spans(prefix, cuts) for prefix, cuts in zip("on", CUTS[cut], strict=True))
    return await rings.caller(), old, new, await agents_of(rings, old, new, **options)


def close(nodes, chain, *sessions: int) -> None:
    """What the scheduler orders when sessions are over."""
    for agent, _, _ in chain:
        nodes[agent].generation.close_sessions(sessions)


async def generating(caller, ring) -> None:
    """Opens session 1, and returns when it generates."""
    await caller.open(1, opening(ring, PROMPT, max_tokens=TOKENS))
    await caller.wait_for(1, 3)


async def hold_up(caller, nodes, new) -> None:
    """Has the last agent of a ring of three compute session 9 until it is let go on."""
    nodes["n-2"].decoders[0].gate.clear()
    await caller.open(9, opening(new, PROMPT))
    await until(lambda: nodes["n-2"].generation.sessions == 1)


def let_go_on(nodes, new) -> None:
    nodes["n-2"].decoders[0].gate.set()
    close(nodes, new, 9)


def failed(nodes) -> list[int]:
    return [each.session_id for node in nodes.values() for each in node.told.of("session_failed")]


@pytest.mark.parametrize(("cut", "mode"), WAYS)
async def test_moved_sessions_say_what_one_whole_model_does(rings, cut, mode):
    caller, old, new, nodes = await two_rings(rings, cut)
    leader = nodes[old[0][0]]
    quick_s = leader.decoders[0].takes_s
    leader.decoders[0].takes_s = 0.05  # no answer ends before its move, however busy the machine
    sessions = (1, 2, 3)
    for session in (*sessions, 4):
        await caller.open(session, opening(old, PROMPT[session:], max_tokens=TOKENS))
    for session in sessions:
        await caller.wait_for(session, 3 * session)
        await caller.move(session, 10 + session, new, by_tokens=MODES[mode])
    told = await leader.told.wait_for("session_moved", 3)
    leader.decoders[0].takes_s = quick_s
    for session in sessions:
        await caller.finished(10 + session)
        assert caller.answer(10 + session) == undisturbed(PROMPT[session:], TOKENS)
        assert caller.tokens[10 + session][0].position > len(PROMPT) - session
        assert not caller.tokens[session][-1].finish_reason
    assert await caller.finished(4) == undisturbed(PROMPT[4:], TOKENS)  # which stayed
    for each in told:
        assert each.session_id == each.moved_session_id + 10
        expected = scheduler_pb2.MOVE_MODE_TOKENS if MODES[mode] else scheduler_pb2.MOVE_MODE_KV
        assert each.mode == expected
        assert each.rounds >= 1
        assert each.duration_ns > each.held_ns > 0
        assert each.tokens + 1 == len(caller.known(each.moved_session_id))
    kinds = [message.WhichOneof("kind") for message in leader.told.messages]
    assert kinds.index("session_moved") < kinds.index("sessions_closed")
    close(nodes, old[1:], *sessions, 4)
    close(nodes, new[1:-1], 11, 12, 13)
    await rings.all_free()
    assert failed(nodes) == []
    assert all(node.generation.ignored == 0 for node in nodes.values())


async def test_by_kv_nothing_is_computed_twice(rings):
    caller, old, new, nodes = await two_rings(rings, "1 to 1")
    await caller.open(1, opening(old, PROMPT, max_tokens=TOKENS))
    await caller.wait_for(1, 5)
    await caller.move(1, 2, new)
    await caller.finished(2)
    computed = [
        tokens for node in nodes.values() for step in node.decoders[0].steps for *_, tokens in step
    ]
    assert sum(computed) == len(PROMPT) + TOKENS - 1
    await rings.all_free()


# -- both rings on the same agents, one move after another, many at once ---------------------------


@pytest.mark.parametrize("mode", BOTH)
async def test_rings_that_share_agents_copy_from_slot_to_slot(rings, mode):
    caller = await rings.caller()
    old = [("a", 0, 3), ("b", 3, 6)]
    new = [("a", 0, 2), ("c", 2, 3), ("b", 3, 6)]
    nodes = {
        "a": await rings.agent("a", toy(0, 3), toy(0, 2), chunk=8),
        "b": await rings.agent("b", toy(3, 6), chunk=8),
        "c": await rings.agent("c", toy(2, 3), chunk=8),
    }
    for node in nodes.values():
        node.decoders[0].takes_s = 0.002
    await caller.open(1, opening(old, PROMPT, max_tokens=TOKENS))
    await caller.wait_for(1, 5)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    await caller.finished(2)
    assert caller.answer(2) == undisturbed(PROMPT, TOKENS)
    frames = {agent: node.told.of("caches_sent") for agent, node in nodes.items()}
    assert not frames["b"]  # whose blocks stay where they are
    close(nodes, old[1:], 1)
    close(nodes, new[1:-1], 2)
    await rings.all_free()
    assert failed(nodes) == []


async def test_a_session_moves_on_and_on_and_back(rings):
    caller = await rings.caller()
    chains = [spans(*each) for each in (("a", [(0, 6)]), ("b", [(0, 2), (2, 6)]), ("c", [(0, 6)]))]
    nodes = await agents_of(rings, *chains)
    await caller.open(1, opening(chains[0], PROMPT, max_tokens=200))
    for session in range(1, 7):
        await caller.wait_for(session, 3)
        by_tokens = session % 2 == 0
        await caller.move(session, session + 1, chains[session % 3], by_tokens=by_tokens)
    await caller.finished(7)
    assert caller.answer(7) == undisturbed(PROMPT, 200)
    close(nodes, chains[1], *range(1, 8))
    await rings.all_free()
    assert failed(nodes) == []


@pytest.mark.system
async def test_many_sessions_leave_an_agent_at_once_while_others_go_on_where_they_go(rings):
    caller, old, new, nodes = await two_rings(rings, "2 to 3", caches=CacheLimits(frame_bytes=128))
    moving, staying = range(1, 9), range(20, 24)
    for session in moving:
        await caller.open(session, opening(old, PROMPT[session:], max_tokens=TOKENS))
    for session in staying:
        await caller.open(session, opening(new, PROMPT[session - 15 :], max_tokens=TOKENS))
    for session in moving:
        await caller.wait_for(session, 3)
    for session in moving:
        await caller.move(session, 100 + session, new, by_tokens=session % 2 == 0)
    for session in moving:
        await caller.finished(100 + session)
        assert caller.answer(100 + session) == undisturbed(PROMPT[session:], TOKENS)
    for session in staying:
        assert await caller.finished(session) == undisturbed(PROMPT[session - 15 :], TOKENS)
    close(nodes, old, *moving)
    close(nodes, new, *(100 + session for session in moving), *staying)
    await rings.all_free()
    assert failed(nodes) == []


@pytest.mark.parametrize("mode", BOTH)
async def test_a_session_of_a_split_phase_moves_once_it_generates(rings, mode):
    caller = await rings.caller()
    prompt, old, new = ([(name, 0, 6)] for name in ("p", "o", "n"))
    nodes = await agents_of(rings, prompt, old, new)
    await caller.open(1, opening(prompt, PROMPT, max_tokens=TOKENS, decode=old))
    await caller.wait_for(1, 1)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    await caller.finished(2)
    assert caller.answer(2) == undisturbed(PROMPT, TOKENS)
    await rings.all_free()
    assert failed(nodes) == []


@pytest.mark.parametrize("mode", BOTH)
async def test_a_move_ordered_while_the_prompt_is_read_waits_for_its_end(rings, mode):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    nodes["o-1"].decoders[0].gate.clear()
    await caller.open(1, opening(old, PROMPT * 3, max_tokens=TOKENS))
    await until(lambda: nodes["o-1"].generation.sessions == 1)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    await nodes["o-0"].settled()
    assert all(nodes[agent].generation.sessions == 0 for agent, _, _ in new)
    nodes["o-1"].decoders[0].gate.set()
    await caller.finished(2)
    assert caller.answer(2) == undisturbed(PROMPT * 3, TOKENS)
    close(nodes, old[1:], 1)
    close(nodes, new[1:-1], 2)
    await rings.all_free()


# -- what fails before the hand-over leaves the session where it is ---------------------------------


async def stays(rings, caller, nodes, old) -> None:
    """Checks that session 1 came to its end where it was, and that 2 holds nothing."""
    assert await caller.finished(1) == undisturbed(PROMPT, TOKENS)
    assert 2 not in caller.tokens
    close(nodes, old[1:], 1)
    for agent in list(nodes):
        nodes[agent].generation.close_sessions([2])  # as the scheduler does
    await rings.all_free()
    assert not any(node.told.of("session_moved") for node in nodes.values())


async def first_failure(node):
    [failure, *_] = await node.told.wait_for("session_failed")
    return failure.session_id, failure.failure.reason, failure.failure.agent_id


@pytest.mark.parametrize("mode", BOTH)
async def test_without_room_a_session_stays(rings, mode):
    caller = await rings.caller()
    old, new = spans("o", [(0, 3), (3, 6)]), spans("n", [(0, 1), (1, 6)])
    nodes = await agents_of(rings, old, new[:1])
    nodes["n-1"] = await rings.agent("n-1", toy(1, 6, slots=4))
    await generating(caller, old)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    assert await first_failure(nodes["n-1"]) == (2, "OVERLOADED", "n-1")
    await stays(rings, caller, nodes, old)
    assert nodes["n-0"].told.of("sessions_closed")  # was told to give up
    assert nodes["o-0"].told.of("session_failed") == []


@pytest.mark.parametrize("mode", BOTH)
async def test_an_agent_that_is_lost_leaves_a_session_where_it_is(rings, mode):
    caller, old, new, nodes = await two_rings(rings, "2 to 3", push_timeout_s=0.3)
    await rings.remove("n-1")
    del nodes["n-1"]
    await generating(caller, old)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    assert await first_failure(nodes["o-0"]) == (2, "PARTITION_LOST", "n-1")
    await stays(rings, caller, nodes, old)


@pytest.mark.parametrize("mode", BOTH)
async def test_a_new_agent_that_says_nothing_is_waited_for_no_longer_than_patience(rings, mode):
    caller = await rings.caller()
    patience = CacheLimits(
        stall_timeout_ns=SECOND_NS // 2
    )  # the others answer in time on any machine
    caller, old, new, nodes = await two_rings(rings, "2 to 3", caches=patience)
    await caller.open(9, opening(new, PROMPT))
    nodes["n-2"].decoders[0].gate.clear()
    await until(nodes["n-2"].decoders[0].entered.is_set)
    nodes["n-2"].decoders[0].entered.clear()
    nodes["o-0"].decoders[0].takes_s = 0.05  # the answer takes longer than patience lasts
    await generating(caller, old)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    assert await first_failure(nodes["o-0"]) == (2, "PARTITION_LOST", "n-2")
    let_go_on(nodes, new)
    await stays(rings, caller, nodes, old)


@pytest.mark.parametrize("where", ["n-1", "o-0"])
async def test_an_executor_that_cannot_copy_leaves_a_session_where_it_is(rings, where):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    decoder = nodes[where].decoders[0]

    def refuse(*arguments):
        raise RuntimeError("broken")

    decoder.export_cache = decoder.import_cache = refuse
    await generating(caller, old)
    await caller.move(1, 2, new)
    assert await first_failure(nodes[where]) == (2, "INTERNAL", where)
    await stays(rings, caller, nodes, old)


async def test_a_stale_order_is_refused_and_a_newer_scheduler_ends_what_an_older_has_begun(rings):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    nodes["o-0"].generation.raise_epoch(5)
    await caller.open(1, opening(old, PROMPT, max_tokens=TOKENS), epoch=5)
    await caller.wait_for(1, 3)
    await caller.move(1, 2, new, epoch=4)
    assert await first_failure(nodes["o-0"]) == (2, "STALE_EPOCH", "o-0")
    await hold_up(caller, nodes, new)  # so that it cannot be handed over
    await caller.move(1, 3, new, epoch=5)
    await until(lambda: nodes["n-1"].generation.sessions == 2)
    nodes["o-0"].generation.raise_epoch(6)
    await nodes["o-0"].told.wait_for("session_failed", 2)
    let_go_on(nodes, new)
    await stays(rings, caller, nodes, old)


@pytest.mark.parametrize("closed", [1, 2])
async def test_closing_either_session_ends_the_move(rings, closed):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    await hold_up(caller, nodes, new)
    await generating(caller, old)
    await caller.move(1, 2, new)
    await until(lambda: nodes["n-1"].generation.sessions == 2)
    close(nodes, old if closed == 1 else new[:2], closed)
    let_go_on(nodes, new)
    if closed == 2:
        await stays(rings, caller, nodes, old)
        return
    for agent, _, _ in new:
        await until(lambda node=nodes[agent]: node.generation.sessions == 0)
    await rings.all_free()
    assert await first_failure(nodes["o-0"]) == (2, "UNAVAILABLE", "o-0")


@pytest.mark.parametrize("mode", BOTH)
async def test_a_session_that_ends_before_it_was_handed_over_has_all_its_tokens(rings, mode):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    await hold_up(caller, nodes, new)
    await generating(caller, old)
    await caller.move(1, 2, new, by_tokens=MODES[mode])
    await caller.finished(1)
    with pytest.raises(AssertionError, match="2 has 0 of 1 tokens: 1 had the last"):
        await caller.wait_for(2, 1)
    let_go_on(nodes, new)
    assert await first_failure(nodes["o-0"]) == (2, "UNAVAILABLE", "o-0")
    await stays(rings, caller, nodes, old)


@pytest.mark.parametrize(
    ("ring", "reason"),
    [
        ([("n-0", 0, 5)], "INVALID_INPUT"),
        ([("n-0", 0, 3), ("n-0", 3, 6)], "INVALID_INPUT"),
        ([("n-0", 1, 6)], "INVALID_INPUT"),
        ([("n-0", 0, 3), ("n-1", 3, 6)], "PARTITION_LOST"),  # which it does not host
    ],
)
async def test_rings_it_cannot_go_to_are_refused(rings, ring, reason):
    caller = await rings.caller()
    old = spans("o", [(0, 6)])
    nodes = await agents_of(rings, old, [("n-0", 0, 6), ("n-1", 0, 6)])
    await generating(caller, old)
    await caller.move(1, 2, ring)
    where = "o-0" if reason == "INVALID_INPUT" else "n-0"
    assert (await first_failure(nodes[where]))[:2] == (2, reason)
    await stays(rings, caller, nodes, old)


async def test_a_second_order_takes_the_place_of_the_first(rings):
    caller, old, new, nodes = await two_rings(rings, "2 to 3")
    await hold_up(caller, nodes, new)
    other = [("x", 0, 6)]
    nodes |= await agents_of(rings, other)
    await generating(caller, old)
    await caller.move(1, 2, new)
    await caller.move(1, 3, other)
    await caller.finished(3)
    assert caller.answer(3) == undisturbed(PROMPT, TOKENS)
    let_go_on(nodes, new)
    close(nodes, old[1:], 1)
    assert (await first_failure(nodes["o-0"]))[0] == 2
    await rings.all_free()


# -- after the hand-over ---------------------------------------------------------------------------


async def test_an_old_agent_that_is_told_to_close_sends_its_last_rows_first(rings):
    small = CacheLimits(frame_bytes=96, window_bytes=97)
    caller, old, new, nodes = await two_rings(rings, "2 to 3", caches=small)
    await generating(caller, old)
    await caller.move(1, 2, new)
    await nodes["o-0"].told.wait_for("session_moved")
    close(nodes, old[1:], 1)
    await caller.finished(2)
    assert caller.answer(2) == undisturbed(PROMPT, TOKENS)
    [closed] = nodes["o-1"].told.of("sessions_closed")
    assert list(closed.session_ids) == [1]
    close(nodes, new[1:-1], 2)
    await rings.all_free()
    assert failed(nodes) == []


async def test_rows_that_cannot_leave_after_the_hand_over_fail_what_it_became(rings):
    caller, old, new, nodes = await two_rings(rings, "1 to 1", push_timeout_s=0.3)
    await generating(caller, old)
    target = nodes["n-0"].decoders[0]
    entered = asyncio.Event()
    loop, real = asyncio.get_running_loop(), target.import_cache

    def held(*arguments):
        loop.call_soon_threadsafe(entered.set)
        real(*arguments)

    target.import_cache = held
    await caller.move(1, 2, new)
    await nodes["o-0"].told.wait_for("session_moved")
    await rings.remove("n-0")
    del nodes["n-0"]
    got = caller.answer(2)
    assert got == undisturbed(PROMPT, TOKENS)[: len(got)]
    await rings.all_free()


@pytest.mark.parametrize("late", ["ready", "give_up", "hand_over", "round"])
async def test_steps_that_nobody_waits_for_are_ignored(rings, late):
    caller, old, _, nodes = await two_rings(rings, "1 to 1")
    step = frame_pb2.SessionMove.Step.Value(f"STEP_{late.upper()}")
    move = frame_pb2.SessionMove(session_id=7, moved_session_id=1, step=step)
    kind = frame_pb2.FRAME_KIND_SESSION_MOVE
    await caller.open(1, opening(old, PROMPT, max_tokens=TOKENS))
    await caller.peer.send("o-0", frame_pb2.FrameHeader(kind=kind, epoch=1, move=move))
    await until(lambda: nodes["o-0"].generation.ignored == 1)
    assert await caller.finished(1) == undisturbed(PROMPT, TOKENS)
    await rings.all_free()
    assert failed(nodes) == []


async def test_streams_beside_a_session_that_is_read_again_keep_short_steps(rings):
    """It generates elsewhere meanwhile, so a quarter of a chunk beside decode rows is enough."""
    caller, old, new, nodes = await two_rings(rings, "1 to 1", chunk=16)
    prompt = PROMPT * 3
    await caller.open(1, opening(new, PROMPT, max_tokens=200))
    await caller.open(2, opening(old, prompt, max_tokens=200))
    await caller.wait_for(1, 3)
    await caller.wait_for(2, 3)
    await caller.move(2, 12, new, by_tokens=True)
    await caller.finished(12)
    assert caller.answer(12) == undisturbed(prompt, 200)
    begun = caller.tokens[12][0].position - 1
    steps = nodes[new[0][0]].decoders[0].steps
    beside = [
        tokens
        for step in steps
        if any(session == 1 and tokens == 1 for session, _, tokens in step)
        for session, position, tokens in step
        if session == 12 and position + tokens <= begun
    ]
    assert sum(beside) > 16
    assert max(beside) == 4
    await caller.finished(1)
    close(nodes, old, 2)
    await rings.all_free()


async def test_a_prompt_gives_way_in_the_step_in_which_a_stream_goes_on(rings):
    caller, old, new, nodes = await two_rings(rings, "1 to 1", chunk=16)
    await caller.open(1, opening(new, PROMPT, max_tokens=60))
    await caller.open(2, opening(old, PROMPT, max_tokens=60))
    await caller.wait_for(1, 3)
    await caller.wait_for(2, 3)
    await caller.open(3, opening(new, PROMPT * 12, max_tokens=2))
    await caller.move(2, 12, new)
    for session in (1, 12, 3):
        await caller.finished(session)
    assert caller.answer(12) == undisturbed(PROMPT, 60)
    steps = nodes[new[0][0]].decoders[0].steps
    here = [{session for session, _, _ in step} for step in steps]
    goes_on = next(number for number, sessions in enumerate(here) if 12 in sessions)
    assert 3 in here[goes_on - 1]
    assert 3 not in here[goes_on]
    assert any(3 in sessions for sessions in here[goes_on + 1 :])
    close(nodes, old, 2)
    await rings.all_free()
