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
from catenary_agent.generation.state.events import CloseOrdered, RowsArrived, SessionOpened
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.session import ArrivalTime, SessionSpec
from catenary_agent.generation.state.states import SessionState
from tests.support.ring_harness import BLOCKS, opening, toy, undisturbed
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


def open_session(loop: GenerationLoop, session: int) -> None:
    made = opening(ALONE, PROMPT, max_tokens=40)
    loop.handle(SessionOpened(SessionSpec(session, made, 0, FAR), ArrivalTime(7)))


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
