"""Guesses on a ring: the same answers in fewer trips, and nothing is believed that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from catenary_agent.decoders.base import DecoderCost
from catenary_agent.generation.context import GenerationLimits
from catenary_agent.generation.drafts.drafter import Drafter
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import RowsArrived, SessionOpened, TokenArrived
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.session import ArrivalTime, Drafts, SessionSpec
from catenary_protos.catenary.v1 import frame_pb2
from tests.support.ring_harness import BLOCKS, HIDDEN, opening, toy, undisturbed
from tests.support.small_models.ring_world import World

RING = [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)]
PROMPT = [3, 14, 15, 9, 26]
FAR = 1 << 62


def generated(world: World, ring: list, count: int, **sampling: object) -> list[int]:
    world.open(1, opening(ring, PROMPT, max_tokens=count, **sampling))
    world.run_out()
    return [token.token_id for token in world.tokens[1]]


@pytest.mark.parametrize("ring", [RING, [("c", 0, BLOCKS)]], ids=["ring", "alone"])
def test_a_text_that_repeats_itself_takes_fewer_steps(ring: list) -> None:
    world = World(4, period=3)
    assert generated(world, ring, 60) == undisturbed(PROMPT, 60, period=3)
    assert world.right > 30
    last = world.decoders["c"]
    assert len(last.steps) < 40


@pytest.mark.parametrize("are_slow", [False, True])
def test_nothing_is_guessed_where_rows_occupy_a_link_for_longer_than_a_trip_takes(
    are_slow: bool,
) -> None:
    world = World(4, period=3, are_slow=are_slow)
    for loop in world.rings.values():
        for batcher in loop.sessions.batchers:
            batcher.cost = DecoderCost(1_000, 100, 1_000, 100)
    assert generated(world, RING, 60) == undisturbed(PROMPT, 60, period=3)
    assert (world.right + world.wrong == 0) == are_slow


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"logprobs": 0},
        {"bad_token_ids": [{"token_ids": [5, 6]}]},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_nothing_is_guessed_where_the_choice_needs_every_token_before_it(
    sampling: dict[str, object],
) -> None:
    world = World(4, period=3)
    generated(world, RING, 30, **sampling)
    assert world.right == world.wrong == 0


def test_nothing_is_guessed_if_an_agent_of_the_ring_is_older() -> None:
    """It does not know the fields, and does not copy them."""
    world = World(4, period=3)
    deliver = world.deliver

    def through_an_older_agent(wire: tuple[str, str]) -> None:
        data, payload, cache = world.wires[wire][0]
        if wire[0] == "b":
            header = frame_pb2.FrameHeader.FromString(data)
            for entry in header.session_rows:
                assert not entry.draft_token_ids
                entry.takes_drafts = False
            world.wires[wire][0] = (header.SerializeToString(), payload, cache)
        deliver(wire)

    world.deliver = through_an_older_agent
    assert generated(world, RING, 30) == undisturbed(PROMPT, 30, period=3)
    assert world.right == world.wrong == 0


def loop_of(first: int, last: int, hop: int, **sampling: object) -> GenerationLoop:
    """An agent of the ring, with session 1."""
    decoder = toy(first, last)
    decoder.period = 3
    loop = GenerationLoop(RING[hop][0], GenerationLimits(8), lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(decoder))
    made = opening(RING, PROMPT, max_tokens=40, **sampling)
    loop.handle(SessionOpened(SessionSpec(1, made, hop, FAR), ArrivalTime(7)))
    return loop


def rows(position: int, count: int, *drafts: int) -> RowsArrived:
    values = np.ones((count, HIDDEN), np.float32)
    return RowsArrived(1, position, values, True, ArrivalTime(7), Drafts(drafts, True))


def failures_of(loop: GenerationLoop) -> list[str]:
    messages = [notice.message() for notice in loop.take_outflow().messages]
    return [
        each.session_failed.failure.message for each in messages if each.HasField("session_failed")
    ]


def test_rows_may_begin_behind_guesses_that_were_right_and_nowhere_else() -> None:
    for position, is_right in ((6, True), (7, True), (8, True), (5, False), (9, False)):
        loop = loop_of(2, 4, 1)
        loop.handle(rows(0, 5))
        loop.step()
        loop.handle(rows(5, 3, 40, 41))
        loop.step()
        session = loop.sessions.get(1)
        assert session is not None
        assert (session.cached, session.drafted) == (6, (40, 41))
        loop.handle(rows(position, 1))
        assert bool(failures_of(loop)) is not is_right
        if is_right:
            loop.step()
            assert session.cached == position + 1
            assert session.batcher.executor.block_tokens(1) > 0


def test_guesses_for_a_session_that_cannot_have_any_fail_it_alone() -> None:
    loop = loop_of(4, BLOCKS, 2, repetition_penalty=1.3)
    loop.handle(rows(0, 5))
    loop.step()
    loop.take_outflow()
    loop.handle(rows(5, 3, 40, 41))
    assert failures_of(loop) == ["draft_token_ids: the parameters of this session exclude guesses"]


def test_a_further_token_is_believed_only_behind_a_guess_of_ones_own() -> None:
    """The rows that are cached behind a guess belong to the guess, whatever the last agent says."""
    for said, is_right in (((9, 3, 14), True), ((9, 4, 14), False), ((9, 3, 14, 9, 3, 14), False)):
        loop = loop_of(0, 2, 0)
        loop.step()
        loop.handle(TokenArrived(1, 5, 15, False, ArrivalTime(7), (), True))
        session = loop.sessions.get(1)
        assert session is not None
        session.tokens[:] = [3, 14, 15, 9, 3, 14]  # 15, 9, 3, 14 is what follows
        session.drafter = Drafter()
        session.drafter.follow(session.tokens)
        loop.step()
        guessed = session.drafted
        assert guessed[:4] == (15, 9, 3, 14)[: len(guessed)]
        loop.take_outflow()
        first, *more = (15, *said)
        loop.handle(TokenArrived(1, 6, first, False, ArrivalTime(7), tuple(more), True))
        assert bool(failures_of(loop)) is not (is_right and len(more) <= len(guessed))
