"""A step is planned without side effects, and events may come while steps are under way."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_agent.decoders.base import FEWEST_CHUNK_TOKENS, DecoderCost
from catenary_agent.generation.context import GenerationLimits
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import (
    CloseOrdered,
    RowsArrived,
    RowsPushed,
    SessionOpened,
)
from catenary_agent.generation.state.partition_batcher import (
    LONGEST_PRECEDENCE_NS,
    PartitionBatcher,
)
from catenary_agent.generation.state.session import ArrivalTime, SessionSpec
from catenary_agent.generation.state.states import SessionState
from tests.support.ring_harness import BLOCKS, HIDDEN, opening, toy, undisturbed
from tests.support.small_models.ring_world import World

ALONE = [("a", 0, BLOCKS)]
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
FAR = 1 << 62
CHAINS = [
    [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)],
    [("d", 0, 3), ("b", 3, 4), ("c", 4, BLOCKS)],
    [("c", 0, BLOCKS)],
    [("e", 0, 3), ("f", 3, BLOCKS)],
]


def loop_of(sessions: int, chunk: int = 4, cache_tokens: int = 0) -> GenerationLoop:
    decoder = toy()
    decoder.book.layout = replace(decoder.layout, cache_tokens=cache_tokens * BLOCKS)
    loop = GenerationLoop("a", GenerationLimits(chunk), lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(decoder))
    for session in range(1, sessions + 1):
        open_session(loop, session)
    return loop


def open_session(
    loop: GenerationLoop,
    session: int,
    prompt: list[int] = PROMPT,
    deadline_ns: int = FAR,
    opened_ns: int = 7,
) -> None:
    made = opening(ALONE, prompt, max_tokens=40)
    loop.handle(SessionOpened(SessionSpec(session, made, 0, deadline_ns), ArrivalTime(opened_ns)))


def first_tokens(loop: GenerationLoop) -> list[int]:
    """The sessions in the order of their first tokens."""
    order: dict[int, None] = {}
    while loop.is_ready:
        loop.step()
        order.update({token.spec.session_id: None for token in loop.take_outflow().tokens})
    return list(order)


def seen_of(loop: GenerationLoop) -> str:
    """Everything that a plan might change."""
    (batcher,) = loop.sessions.batchers
    sessions = [
        (each.state, each.tokens, each.cached, each.steps, repr(each.history), each.arrived)
        for each in loop.sessions
    ]
    queues = (batcher.decoding, batcher.urgent, batcher.prefilling, batcher.is_awaited)
    return repr((sessions, queues, loop.sessions.out, batcher.executor.sessions))


def works_of(plan) -> list[tuple[int, int, list[int], bool]]:
    return [
        (work.session.spec.session_id, work.position, work.inputs.tolist(), work.sample)
        for work in plan.works
    ]


def test_planning_changes_nothing_and_says_the_same_twice() -> None:
    loop = loop_of(5, cache_tokens=32)
    for _ in range(60):
        before = seen_of(loop)
        one, other = loop.runner.plan_step(), loop.runner.plan_step()
        assert seen_of(loop) == before
        assert one is not None
        assert other is not None
        assert works_of(one) == works_of(other)
        assert list(one.evicted) == list(other.evicted)
        loop.step()
        if not loop.is_ready:
            break
    failed = [each.message().session_failed.session_id for each in loop.take_outflow().messages]
    assert set(failed) - {0} == {2, 3, 4, 5}  # the others never fit beside the oldest


def test_a_plan_has_all_decode_rows_and_one_chunk_of_prompts() -> None:
    loop = loop_of(1)
    for _ in range(2):
        loop.step()
    open_session(loop, 2)
    open_session(loop, 3)
    plan = loop.runner.plan_step()
    assert plan is not None
    assert [(each[0], len(each[2]), each[3]) for each in works_of(plan)] == [
        (1, 1, True),
        (2, 4, False),
    ]
    assert plan.size.decode_rows == 1
    assert plan.size == (1, len(PROMPT), (4,))


def test_prompts_are_read_one_after_the_other_as_they_came() -> None:
    loop = loop_of(0)
    for session, opened_ns in ((1, 30), (2, 10), (3, 20)):
        open_session(loop, session, PROMPT * 4, opened_ns=opened_ns)
    assert first_tokens(loop) == [2, 3, 1]


def test_the_prompt_with_the_earlier_deadline_is_read_first_even_if_another_has_begun() -> None:
    loop = loop_of(0)
    open_session(loop, 1, PROMPT * 4, deadline_ns=9_000)
    loop.step()
    open_session(loop, 2, PROMPT * 4, deadline_ns=8_000, opened_ns=8)
    assert first_tokens(loop) == [2, 1]


def test_of_prompts_that_came_together_the_one_with_the_shortest_rest_is_read_first() -> None:
    loop = loop_of(0)
    open_session(loop, 1, PROMPT * 4)
    open_session(loop, 2, PROMPT * 2)
    open_session(loop, 3, PROMPT * 3)
    assert first_tokens(loop) == [2, 3, 1]


def test_a_long_prompt_without_hurry_is_read_however_many_urgent_ones_keep_coming() -> None:
    second = 1_000_000_000
    loop = loop_of(0)
    open_session(loop, 1, PROMPT * 6, deadline_ns=3_600 * second, opened_ns=0)
    # Each has two seconds, and one comes before every step: a step reads one of them at most.
    for number in range(60):
        moment = number * second
        open_session(loop, 2 + number, [3, 1, 4, 1], moment + 2 * second, moment)
        loop.step()
        if any(token.spec.session_id == 1 for token in loop.take_outflow().tokens):
            break
    assert LONGEST_PRECEDENCE_NS < moment <= LONGEST_PRECEDENCE_NS + 30 * second


def test_prompts_leave_decode_rows_their_place_in_every_step() -> None:
    loop = loop_of(1)
    for _ in range(2):
        loop.step()
    for session in range(2, 6):
        open_session(loop, session, PROMPT * 4, deadline_ns=8)
    for _ in range(5):
        plan = loop.runner.plan_step()
        assert plan is not None
        assert (plan.works[0].session.spec.session_id, plan.size.decode_rows) == (1, 1)
        loop.step()


def test_a_prompt_for_a_slow_link_is_computed_in_pieces_that_wait_until_the_link_is_free() -> None:
    row_bytes, ring = 4 * HIDDEN, [("a", 0, 2), ("b", 2, BLOCKS)]
    limits = GenerationLimits(64, link_bytes={"b": 10 * row_bytes})
    loop = GenerationLoop("a", limits, lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(toy(0, 2)))
    for session in (1, 2):
        made = opening(ring, PROMPT * 4, max_tokens=3)
        loop.handle(SessionOpened(SessionSpec(session, made, 0, FAR), ArrivalTime(session)))
    pieces = rows_of_all_steps(loop)
    both = [(session, first, 10, False) for session in (1, 2) for first in (0, 10)]
    assert sorted(pieces) == both
    assert not loop.is_ready
    loop.handle(RowsPushed(1))
    assert rows_of_all_steps(loop) == [(1, 20, 10, False)]
    loop.handle(RowsPushed(1))
    assert rows_of_all_steps(loop) == [(1, 30, 2, True)]


def rows_of_all_steps(loop: GenerationLoop) -> list[tuple[int, int, int, bool]]:
    """Session, position, number and sample of all rows that go to the next agent."""
    pieces = []
    while loop.is_ready:
        loop.step()
        for each in loop.take_outflow().rows:
            pieces.append((each.spec.session_id, each.position, len(each.rows), each.sample))
            assert each.turn is not None
            assert each.turn.session_id == each.spec.session_id
    return pieces


def test_rows_that_come_faster_than_they_are_computed_are_computed_together() -> None:
    loop = GenerationLoop("b", GenerationLimits(64), lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(toy(2)))
    made = opening([("a", 0, 2), ("b", 2, BLOCKS)], PROMPT * 3)
    loop.handle(SessionOpened(SessionSpec(1, made, 1, FAR), ArrivalTime(7)))
    rows = np.arange(24 * HIDDEN, dtype=np.float32).reshape(24, HIDDEN)
    for first in (0, 8, 16):
        part, is_last = rows[first : first + 8], first == 16
        loop.handle(RowsArrived(1, first, part, is_last, ArrivalTime(7)))
    plan = loop.runner.plan_step()
    assert plan is not None
    [work] = plan.works
    assert (work.position, work.sample) == (0, True)
    assert np.array_equal(work.inputs, rows)
    loop.step()
    out = loop.take_outflow()
    assert len(out.tokens) == 1
    assert out.consumed_bytes == rows.nbytes


def test_prompts_hold_up_streams_for_no_longer_than_their_cost_allows() -> None:
    loop = loop_of(1, chunk=8)
    (batcher,) = loop.sessions.batchers
    batcher.cost = DecoderCost(0, 1_000, 1_000, 100, prefill_chunk_tokens=3)
    alone = loop.runner.plan_step()
    assert alone is not None
    assert alone.size.chunks == (8,)
    for _ in range(2):
        loop.step()
    open_session(loop, 2)
    open_session(loop, 3)
    beside = loop.runner.plan_step()
    assert beside is not None
    assert beside.size == (1, len(PROMPT) + 1, (3,))


COSTS = st.builds(DecoderCost, *[st.integers(0, 10**9)] * 2, st.just(0), st.just(0))


@given(COSTS, st.integers(0, 10**10), st.integers(1, 4_096))
def test_a_chunk_is_the_longest_within_a_time_but_never_less_than_a_few_tokens(
    cost: DecoderCost, pause_ns: int, most: int
) -> None:
    def takes(tokens: int) -> int:
        return cost.prefill_ns + tokens * cost.prefill_token_ns

    chunk = cost.chunk_within(pause_ns, most)
    assert 1 <= chunk <= most
    if pause_ns == 0 or cost.prefill_token_ns == 0:
        assert chunk == most
    else:
        assert takes(chunk) <= pause_ns or chunk == min(most, FEWEST_CHUNK_TOKENS)
        assert takes(chunk + 1) > pause_ns or chunk == most


def test_executing_touches_no_session() -> None:
    loop = loop_of(3)
    plan = loop.runner.plan_step()
    assert plan is not None
    plan = loop.runner.begin(plan)
    before = seen_of(loop)
    output = loop.runner.execute(plan)
    assert seen_of(loop) == before
    loop.runner.apply(plan, *output)
    assert seen_of(loop) != before


def test_a_stale_plan_leaves_out_what_was_closed() -> None:
    loop = loop_of(3, chunk=64)
    for _ in range(3):
        loop.step()
    plan = loop.runner.plan_step()
    assert plan is not None
    assert plan.size.decode_rows == 3
    loop.handle(CloseOrdered((2,)))
    begun = loop.runner.begin(plan)
    assert [work.session.spec.session_id for work in begun.works] == [1, 3]
    assert begun.size.decode_rows == 2


def test_what_was_closed_while_it_was_computed_is_not_sent_and_gives_its_rows_back() -> None:
    loop = GenerationLoop("b", GenerationLimits(64), lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(toy(2)))
    made = opening([("a", 0, 2), ("b", 2, BLOCKS)], PROMPT)
    loop.handle(SessionOpened(SessionSpec(1, made, 1, FAR), ArrivalTime(7)))
    rows = np.ones((len(PROMPT), 4), np.float32)
    loop.handle(RowsArrived(1, 0, rows, True, ArrivalTime(7)))
    plan = loop.runner.plan_step()
    assert plan is not None
    plan = loop.runner.begin(plan)
    output = loop.runner.execute(plan)
    loop.handle(CloseOrdered((1,)))
    assert plan.works[0].session.state is SessionState.CLOSED
    loop.runner.apply(plan, *output)
    out = loop.take_outflow()
    assert not out.tokens
    assert out.consumed_bytes == rows.nbytes
    assert [(each.decode_rows, each.prefill_tokens) for each in out.steps] == [(0, len(PROMPT))]


class Overlapped(World):
    """Begins a step and applies it later, with up to `depth` steps under way at each agent."""

    def __init__(self, chunk: int, depth: int) -> None:
        super().__init__(chunk)
        self.depth = depth
        self.under_way: dict[str, deque] = {name: deque() for name in self.rings}

    def step(self, agent: str) -> None:
        """Begins another step if there is one; otherwise applies the one that began first."""
        loop, under_way = self.rings[agent], self.under_way[agent]
        loop.expire()
        plan = loop.runner.plan_step() if len(under_way) < self.depth else None
        if plan is not None:
            plan = loop.runner.begin(plan)
            if plan.works:
                under_way.append((plan, loop.runner.execute(plan)))
        elif under_way:
            plan, output = under_way.popleft()
            loop.runner.apply(plan, *output)
            loop.migrations.settle()
            loop.validate()
        self._collect(agent)

    def ready(self) -> list[str]:
        return sorted({*super().ready(), *(name for name, each in self.under_way.items() if each)})


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_events_may_come_in_any_order_while_steps_are_under_way(data, chunk, depth) -> None:
    world = Overlapped(chunk, depth)
    sessions = {}
    for session in range(1, data.draw(st.integers(1, 5)) + 1):
        prompt = data.draw(st.lists(st.integers(0, 48), min_size=1, max_size=12))
        count = data.draw(st.integers(1, 9))
        sessions[session] = (data.draw(st.sampled_from(CHAINS)), prompt, count)
    cancelled = data.draw(st.sets(st.sampled_from(sorted(sessions))))
    waiting = [("open", session) for session in sessions]
    waiting += [("close", session) for session in cancelled]
    for _ in range(100):
        choices = [("deliver", wire) for wire in world.busy()]
        choices += [("step", agent) for agent in world.ready()] + waiting[:1]
        if not choices:
            break
        kind, what = data.draw(st.sampled_from(choices))
        if kind == "deliver":
            world.deliver(what)
        elif kind == "step":
            world.step(what)
        else:
            waiting.remove((kind, what))
            act(world, kind, what, sessions)
    for kind, what in waiting:
        act(world, kind, what, sessions)
    world.run_out()
    for session, (chain, prompt, count) in sessions.items():
        got = [token.token_id for token in world.tokens.get(session, ())]
        expected = undisturbed(prompt, count)
        assert got == (expected if session not in cancelled else expected[: len(got)])
        for agent, _, _ in chain:
            if agent not in world.closed.get(session, ()):
                world.close(agent, session)
    world.run_out()
    assert not world.failed
    world.assert_all_free()


def act(world: World, kind: str, session: int, sessions: dict) -> None:
    chain, prompt, count = sessions[session]
    if kind == "open":
        world.open(session, opening(chain, prompt, max_tokens=count))
    else:
        for agent, _, _ in chain:
            world.close(agent, session)
