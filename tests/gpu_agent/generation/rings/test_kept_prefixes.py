"""Sessions that begin like one before: nothing is computed twice, and no token is another one."""

from __future__ import annotations

import random
from functools import partial

import pytest

from catenary_agent.decoders.base import CacheLayout, set_layout
from catenary_agent.generation.cache.cache_budget import room_for_kept
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from tests.support.ring_harness import BLOCKS, opening, undisturbed
from tests.support.small_models.ring_world import World

BLOCK = PREFIX_BLOCK_TOKENS
RING = [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)]
ALONE = [("c", 0, BLOCKS)]
HEAD = [(i * i * 3 + 5 * i) % 48 for i in range(3 * BLOCK)]
CHUNK = 16
MOST_OPEN = 6


def ask(world: World, session: int, ring: list, prompt: list[int], count: int = 5, **more) -> None:
    """Has a session answer and end, at every agent."""
    made = opening(ring, prompt, max_tokens=count, **more)
    made.adapter = ""
    world.open(session, made)
    world.run_out()
    for agent, _, _ in ring:
        world.close(agent, session)
    world.run_out()


def answer(world: World, session: int) -> list[int]:
    return [token.token_id for token in world.tokens[session]]


def rows_of(world: World, agent: str, session: int) -> int:
    """The number of rows that an agent has computed for a session."""
    steps = world.decoders[agent].steps
    return sum(count for step in steps for name, _, count in step if name == session)


@pytest.mark.parametrize("ring", [RING, ALONE], ids=["ring", "alone"])
def test_a_shared_beginning_is_computed_once(ring: list) -> None:
    world = World(CHUNK)
    one, other = [*HEAD, 7, 8, 9], [*HEAD, 40, 41]
    ask(world, 1, ring, one)
    ask(world, 2, ring, other)
    assert answer(world, 1) == undisturbed(one, 5)
    assert answer(world, 2) == undisturbed(other, 5)
    assert world.asked == [(len(one), 0), (len(other), len(HEAD))]
    for agent, _, _ in ring:
        assert rows_of(world, agent, 2) == 2 + 4
    assert not world.failed
    world.assert_all_free()


@pytest.mark.parametrize("ring", [RING, ALONE], ids=["ring", "alone"])
def test_the_gateway_hears_with_the_first_token_what_was_reused(ring: list) -> None:
    world = World(CHUNK)
    ask(world, 1, ring, [*HEAD, 7])
    ask(world, 2, ring, [*HEAD, 7])
    assert not any(token.HasField("cached_tokens") for token in world.tokens[1])
    first, *others = world.tokens[2]
    assert first.cached_tokens == len(HEAD)
    assert not any(token.HasField("cached_tokens") for token in others)


@pytest.mark.parametrize("ring", [RING, ALONE], ids=["ring", "alone"])
@pytest.mark.parametrize("period", [0, 3], ids=["no guess", "guesses"])
def test_the_next_turn_of_a_conversation_begins_behind_the_answer(ring: list, period: int) -> None:
    """Agents in the middle hear what was sampled, so the answer is part of what they keep."""
    world = World(CHUNK, period=period)
    text, kept = HEAD[:40], 0
    for session in range(1, 4):
        ask(world, session, ring, text, 50)
        said = answer(world, session)
        assert said == undisturbed(text, 50, period=period)
        if session > 1:
            assert world.asked[-1][1] == kept
        # The last token of an answer is sampled and not computed.
        kept = (len(text) + len(said) - 1) // BLOCK * BLOCK
        text = [*text, *said, *HEAD[session : session + 11]]
    assert not world.failed
    world.assert_all_free()


def test_only_what_all_agents_of_a_ring_have_counts() -> None:
    world = World(CHUNK)
    ask(world, 1, RING, [*HEAD, 7])
    middle = world.rings["b"].sessions.batchers[0]
    middle.kept.shrink(BLOCK * 2)  # two blocks of the model there: one block of tokens
    ask(world, 2, RING, [*HEAD, 8])
    assert answer(world, 2) == undisturbed([*HEAD, 8], 5)
    assert world.asked[-1] == (len(HEAD) + 1, BLOCK)
    assert [rows_of(world, agent, 2) for agent, _, _ in RING] == [2 * BLOCK + 1 + 4] * 3
    ask(world, 3, RING, [*HEAD, 9])  # and what was computed for want of one is kept again
    assert world.asked[-1] == (len(HEAD) + 1, len(HEAD))
    world.assert_all_free()


@pytest.mark.parametrize("agent", ["a", "b", "c"])
def test_an_agent_that_came_back_holds_nothing_and_costs_only_time(agent: str) -> None:
    world = World(CHUNK)
    ask(world, 1, RING, [*HEAD, 7])
    for batcher in world.rings[agent].sessions.batchers:
        batcher.kept.clear()
    ask(world, 2, RING, [*HEAD, 8])
    assert answer(world, 2) == undisturbed([*HEAD, 8], 5)
    assert world.asked[-1] == (len(HEAD) + 1, 0)
    assert not world.failed
    world.assert_all_free()


def test_a_ring_that_does_not_answer_in_time_reads_the_whole_prompt() -> None:
    """An agent of an older release opens the session, and knows nothing of the question."""
    world = World(CHUNK)
    ask(world, 1, RING, [*HEAD, 7])
    deliver = world.deliver

    def to_an_older_agent(wire: tuple[str, str]) -> None:
        data, payload, cache = world.wires[wire][0]
        if wire[1] == "b":
            header = frame_pb2.FrameHeader.FromString(data)
            for entry in header.session_rows:
                entry.opening.ClearField("prefix_tokens") if entry.HasField("opening") else None
            world.wires[wire][0] = (header.SerializeToString(), payload, cache)
        deliver(wire)

    world.deliver = to_an_older_agent
    world.open(2, opening(RING, [*HEAD, 8], max_tokens=5))
    world.run_out()
    assert 2 not in world.tokens
    world.skipped_ns += 3_000_000_000
    world.step("a")
    world.run_out()
    assert answer(world, 2) == undisturbed([*HEAD, 8], 5)
    assert world.asked[-1] == (len(HEAD) + 1, 0)


def test_an_answer_that_comes_late_or_twice_is_ignored() -> None:
    world = World(CHUNK)
    ask(world, 1, RING, [*HEAD, 7])
    token = frame_pb2.SessionToken(session_id=1, cached_tokens=BLOCK)
    header = frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_TOKENS, epoch=1, session_tokens=[token]
    )
    world.wires[("c", "a")].append((header.SerializeToString(), b"", None))
    before = world.rings["a"].ignored
    world.run_out()
    assert world.rings["a"].ignored == before + 1


@pytest.mark.parametrize("claimed", [1, BLOCK, 3 * BLOCK, 1 << 20])
def test_a_ring_that_claims_more_than_it_was_asked_for_is_believed_up_to_that(claimed: int) -> None:
    world = World(CHUNK)
    ask(world, 1, RING, [*HEAD, 7])
    world.open(2, opening(RING, [*HEAD, 8], max_tokens=5))
    world.deliver(("gw-0", "a"))
    token = frame_pb2.SessionToken(session_id=2, cached_tokens=claimed)
    header = frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_TOKENS, epoch=1, session_tokens=[token]
    )
    world.wires.setdefault(("c", "a"), type(world.wires[("gw-0", "a")])()).append(
        (header.SerializeToString(), b"", None)
    )
    world.deliver(("c", "a"))
    world.run_out()
    assert answer(world, 2) == undisturbed([*HEAD, 8], 5)


@pytest.mark.parametrize(
    "more",
    [{"prompt_logprobs": 0}],
    ids=["scored"],
)
def test_a_prompt_that_is_scored_is_computed(more: dict) -> None:
    world = World(CHUNK)
    ask(world, 1, ALONE, [*HEAD, 7])
    ask(world, 2, ALONE, [*HEAD, 8], **more)
    assert rows_of(world, "c", 2) == len(HEAD) + 1 + 4


def test_caches_of_another_adapter_are_others() -> None:
    world = World(CHUNK)
    for decoder in world.decoders.values():
        decoder.adapters = frozenset({"polite"})
    for session, adapter in enumerate(["", "polite", "polite"], 1):
        made = opening(ALONE, [*HEAD, 7], max_tokens=2)
        made.adapter = adapter
        world.open(session, made)
        world.run_out()
    assert [reused for _, reused in world.asked] == [0, 0, len(HEAD)]


def test_a_session_that_fails_leaves_nothing_it_may_have_computed_wrongly() -> None:
    world = World(CHUNK)
    decoder = world.decoders["c"]
    world.open(1, opening(ALONE, [*HEAD, 7], max_tokens=5))
    world.deliver(("gw-0", "c"))
    decoder.fails = RuntimeError("broken")
    world.step("c")
    world.run_out()
    decoder.fails = None
    assert world.failed == {1}
    assert all(not each.kept.size for each in world.rings["c"].sessions.batchers)


def kept_at(world: World, agent: str) -> PartitionBatcher:
    (batcher,) = [each for each in world.rings[agent].sessions.batchers if each.kept.size]
    return batcher


def test_caches_of_sessions_come_before_what_is_kept() -> None:
    """What is kept never takes memory that the book may promise to a session."""
    world = World(CHUNK)
    room = 5 * BLOCK * BLOCKS
    for decoder in world.decoders.values():
        set_layout(decoder, CacheLayout(40, 512, decoder.layout.entry_blocks, room))
    for session in range(1, 9):
        ask(world, session, ALONE, [session, *HEAD[: 2 * BLOCK], 7])
    batcher = kept_at(world, "c")
    assert 0 < batcher.kept.size <= room
    world.open(20, opening(ALONE, [30, *HEAD, *HEAD[:40]], max_tokens=8))
    while world.busy() or world.ready():
        for wire in world.busy():
            world.deliver(wire)
        for agent in world.ready():
            world.step(agent)
            held = batcher.executor.cached_block_tokens
            assert held + batcher.kept.size <= room
            assert batcher.kept.size <= room_for_kept(batcher, {})
    assert not world.failed
    assert len(answer(world, 20)) == 8


def test_what_was_used_last_stays_longest() -> None:
    world = World(CHUNK)
    for decoder in world.decoders.values():
        set_layout(decoder, CacheLayout(40, 512, decoder.layout.entry_blocks, 9 * BLOCK * BLOCKS))
    ask(world, 1, ALONE, [*HEAD, 7])
    for session in range(2, 9):
        ask(world, session, ALONE, [session, *HEAD[:BLOCK]])
        ask(world, 10 + session, ALONE, [*HEAD, session])
        assert world.asked[-1] == (len(HEAD) + 1, len(HEAD))


def test_nothing_is_kept_where_it_is_not_wanted() -> None:
    world = World(CHUNK)
    for batcher in world.rings["c"].sessions.batchers:
        batcher.executor.exports_caches = False
    ask(world, 1, ALONE, [*HEAD, 7])
    ask(world, 2, ALONE, [*HEAD, 8])
    assert world.asked[-1] == (len(HEAD) + 1, 0)


def test_a_partition_that_goes_takes_what_it_kept_with_it() -> None:
    world = World(CHUNK)
    ask(world, 1, ALONE, [*HEAD, 7])
    batcher = kept_at(world, "c")
    world.rings["c"].retire_batcher(batcher)
    assert not batcher.kept.size


def test_a_session_that_moves_takes_its_beginning_along() -> None:
    """Its answer on the new ring, and the next turn there, begin behind what moved."""
    world = World(CHUNK)
    prompt = [*HEAD, 7]
    world.open(1, opening(RING, prompt, max_tokens=250))
    while len(world.tokens.get(1, ())) < 10:
        for wire in world.busy():
            world.deliver(wire)
        for agent in world.ready():
            world.step(agent)
    other = [("d", 0, 3), ("f", 3, BLOCKS)]
    made = opening(other, [*prompt, *answer(world, 1)], prompt_tokens=len(prompt), max_tokens=250)
    move = frame_pb2.SessionMove(
        session_id=2,
        moved_session_id=1,
        step=frame_pb2.SessionMove.STEP_BEGIN,
        opening=made,
    )
    header = frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_SESSION_MOVE, epoch=1, move=move)
    world.wires[("gw-0", "a")].append((header.SerializeToString(), b"", None))
    world.run_out()
    said = [*answer(world, 1), *answer(world, 2)]
    assert said == undisturbed(prompt, 250)
    for agent, _, _ in (*RING, *other):
        for session in (1, 2):
            world.close(agent, session)
    world.run_out()
    ask(world, 3, other, [*prompt, *said, 5])
    assert world.asked[-1][1] == (len(prompt) + len(said) - 1) // BLOCK * BLOCK
    assert answer(world, 3) == undisturbed([*prompt, *said, 5], 5)
    world.assert_all_free()


def is_over(world: World, session: int) -> bool:
    return any(token.finish_reason for token in world.tokens.get(session, ()))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_shared_or_lost_meanwhile_no_answer_changes(seed: int) -> None:
    draw = random.Random(seed)
    world = World(CHUNK, period=draw.choice([0, 0, 4]), are_slow=seed % 2 == 1)
    period = next(iter(world.decoders.values())).period
    heads = [[draw.randrange(48) for _ in range(draw.choice([20, 40, 70, 130]))] for _ in range(3)]
    rings = [RING, ALONE, [("d", 0, 3), ("f", 3, BLOCKS)]]
    asked: dict[int, list[int]] = {}
    for session in range(1, 26):
        prompt = [*draw.choice(heads), *[draw.randrange(48) for _ in range(draw.randrange(1, 9))]]
        asked[session] = prompt
        world.open(session, opening(draw.choice(rings), prompt, max_tokens=draw.choice([2, 40])))
        moves = draw.choice([0, 3, 60])
        # A scheduler would let no more in than there are slots for.
        while (ways := [*world.busy(), *world.ready()]) and (
            moves > 0 or sum(not is_over(world, each) for each in asked) >= MOST_OPEN
        ):
            moves -= 1
            way = draw.choice(ways)
            world.deliver(way) if isinstance(way, tuple) else world.step(way)
        for each in filter(partial(is_over, world), asked):  # as the scheduler would
            for agent in "abcdf":
                world.close(agent, each)
        if draw.random() < 0.2:
            name = draw.choice(list(world.rings))
            for batcher in world.rings[name].sessions.batchers:
                batcher.kept.shrink(batcher.kept.size // 2)
    world.run_out()
    assert not world.failed
    for each, prompt in asked.items():
        said = answer(world, each)
        assert said == undisturbed(prompt, len(said), period=period), each
    for ring in rings:
        for agent, _, _ in ring:
            for each in asked:
                world.close(agent, each)
    world.assert_all_free()
    assert sum(reused for _, reused in world.asked) > 0
