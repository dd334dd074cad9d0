"""Time that steps of language models reserve on devices that compute batches too."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary_scheduler.book import (
    Book,
    Cache,
    Pool,
    PoolChain,
    ProbeStage,
    SlotClaims,
    StepLine,
)
from catenary_scheduler.book.steps import DeviceSteps, ratio_of
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    ModelKey,
    PartitionKey,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import Agent

MS = 1_000_000
BLOCKS = 4
COMPUTE = (5 * MS, 8 * MS, 11 * MS)
PARTS = [PartitionKey(ModelKey(name, "1"), 0, BLOCKS) for name in ("small", "large")]


def agent(name: str) -> Agent:
    return Agent(AgentId(name), "x", ServerId(name), 1, 10**9)


def line_of(at: int) -> StepLine:
    """Returns the line of the small or the large model; the large one spends half elsewhere."""
    return StepLine(
        BLOCKS,
        (2 + 3 * at) * MS,
        MS,
        100.0,
        (2 + at) * MS,
        MS,
        1000.0,
        chunk_tokens=64,
        share=0.5 if at else 1.0,
        most=0.8 if at else 1.0,
    )


class SharedBook(RuleBasedStateMachine):
    """Batches and sessions of two models on three devices, under any order of the verbs."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        names = ("a", "b", "c")
        self.pool = Pool([self.book.member(agent(name)) for name in names])
        self.book.follow([self.pool])
        self.route = PoolChain([ProbeStage(self.pool, COMPUTE, 0)])
        self.caches: list[Cache] = []
        for name in ("a", "b", "elsewhere"):
            for at, part in enumerate(PARTS):
                cache = self.book.slots.cache(AgentId(name), part)
                cache.capacity = 100
                self.book.slots.take_line(cache, line_of(at))
                self.caches.append(cache)
        self.held: dict[SessionId, dict[Cache, int]] = {}
        self.expiry: dict[SessionId, int] = {}
        self.batches: list[BatchId] = []
        self.now = self.numbers = 0

    @rule(data=st.data(), lasts=st.integers(1, 200))
    def session_begins(self, data: st.DataObject, lasts: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.caches), min_size=1, unique=True))
        slots = tuple(data.draw(st.integers(1, BLOCKS)) for _ in chosen)
        self.numbers += 1
        session = SessionId(self.numbers)
        claims = SlotClaims(tuple(chosen), slots)
        if self.book.slots.probe(claims) is None:
            expires = self.now + lasts * MS
            self.book.slots.reserve(session, claims, self.now, expires)
            self.held[session] = dict(zip(chosen, slots, strict=True))
            self.expiry[session] = expires

    @precondition(lambda self: self.held)
    @rule(data=st.data(), slots=st.integers(0, BLOCKS))
    def agent_corrects(self, data: st.DataObject, slots: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.held)))
        cache = data.draw(st.sampled_from(self.caches))
        self.book.slots.correct(session, cache, slots, self.now, self.expiry[session])
        self.held[session][cache] = slots
        if not any(self.held[session].values()):
            del self.held[session]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def session_ends(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.held)))
        self.book.slots.release(session)
        del self.held[session]

    @rule(step=st.integers(1, 50))
    def time_passes(self, step: int) -> None:
        self.now += step * MS
        for session in self.book.slots.expire(self.now):
            del self.held[session]
        self.book.prune(self.now)
        gone = set(self.book.expire(self.now))
        self.batches = [batch for batch in self.batches if batch not in gone]

    @rule(rows=st.integers(1, 3))
    def batch(self, rows: int) -> None:
        path = self.book.probe(self.route, rows, self.now)
        (step,) = path.steps
        (line,) = [m.gpu for m in self.pool.members if m.agent == step.member.agent]
        assert step.compute_ns == line.with_steps(self.now, COMPUTE[rows - 1])
        self.numbers += 1
        self.book.reserve(BatchId(self.numbers), path.steps, path.finish_ns + 500 * MS)
        self.batches.append(BatchId(self.numbers))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), late=st.integers(-3, 9), spent=st.integers(1, 20))
    def batch_is_reported(self, data: st.DataObject, late: int, spent: int) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        start = max(0, self.now + late * MS)
        self.book.correct(batch, 0, start, start + spent * MS)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def batch_ends(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.book.release(batch)
        self.batches.remove(batch)

    @invariant()
    def what_is_reserved_is_what_sessions_hold(self) -> None:
        for member in self.pool.members:
            longest, asked = 0.0, 0.0
            for cache in self.caches:
                used = sum(slots.get(cache, 0) for slots in self.held.values())
                assert cache.used == used
                if cache.agent == member.agent and used:
                    line = line_of(PARTS.index(cache.partition))
                    sessions = max(1.0, used / BLOCKS)
                    step = line.lone_ns
                    if used > BLOCKS:
                        step = line.step_ns + line.session_ns * sessions
                    longest = max(longest, step)
                    asked += min(line.most, line.share * sessions)
            assert member.gpu.step_ns == round(longest)
            assert member.gpu.step_ratio == ratio_of(min(1.0, asked))
            assert member.gpu.has_steps == (longest > 0)
        assert self.pool.sharing == sum(member.gpu.has_steps for member in self.pool.members)

    @invariant()
    def a_device_is_never_promised_twice(self) -> None:
        for member in self.pool.members:
            intervals = list(zip(member.gpu.starts, member.gpu.ends, strict=True))
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(intervals))
            for duration in COMPUTE:
                booked = member.gpu.with_steps(self.now, duration)
                steps = booked - duration
                assert 0 <= steps <= member.gpu.step_ns
                device = self.book.slots.devices.get(member.gpu.resource)
                asked = device.asked if device is not None else 0.0
                assert 0.0 <= asked <= 1.0
                assert steps <= asked * booked + booked / 512  # never more than steps ask for

    @invariant()
    def another_scheduler_reserves_the_same(self) -> None:
        other = Book()
        pool = Pool([other.member(agent(str(member.agent))) for member in self.pool.members])
        other.restore(self.book.snapshot())
        for cache in self.caches:
            mine = other.slots.cache(cache.agent, cache.partition)
            other.slots.take_line(mine, line_of(PARTS.index(cache.partition)))
        for here, there in zip(self.pool.members, pool.members, strict=True):
            assert (there.gpu.step_ns, there.gpu.step_ratio) == (
                here.gpu.step_ns,
                here.gpu.step_ratio,
            )


TestSharedBook = SharedBook.TestCase
TestSharedBook.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def shared(lone_ns: float = 4 * MS) -> tuple[Book, Cache, DeviceSteps]:
    """Returns a book with one device that computes both, and one cache on it."""
    book = Book()
    cache = book.slots.cache(AgentId("a"), PARTS[0])
    cache.capacity = 100
    member = book.member(agent("a"))
    line = StepLine(BLOCKS, 3 * MS, MS, 0.0, lone_ns, MS, 1000.0, chunk_tokens=100)
    book.slots.take_line(cache, line)
    return book, cache, book.slots.devices[member.gpu.resource]


def test_a_batch_waits_for_one_step_of_sessions_that_are_always_ready() -> None:
    book, cache, device = shared()
    assert device.timeline.with_steps(0, 10 * MS) == 10 * MS
    book.slots.reserve(SessionId(1), SlotClaims((cache,), (BLOCKS,)), 0, 100)
    assert device.timeline.with_steps(0, 10 * MS) == 14 * MS
    book.slots.release(SessionId(1))
    assert device.timeline.with_steps(0, 10 * MS) == 10 * MS


def test_steps_of_a_long_ring_are_reserved_by_their_share() -> None:
    book, cache, device = shared()
    slow = StepLine(BLOCKS, 4 * MS, 0.0, 0.0, share=0.1, most=0.5)
    book.slots.take_line(cache, slow)
    book.slots.reserve(SessionId(1), SlotClaims((cache,), (BLOCKS,)), 0, 100)
    assert device.timeline.with_steps(0, 9 * MS) == pytest.approx(10 * MS, rel=0.001)
    book.slots.reserve(SessionId(2), SlotClaims((cache,), (9 * BLOCKS,)), 0, 100)
    assert device.timeline.with_steps(0, 3 * MS) == 6 * MS  # half of it, and no more than a step


def test_a_prompt_is_reserved_until_it_has_run_and_expires_by_itself() -> None:
    book, cache, device = shared()
    claims = SlotClaims((cache,), (BLOCKS,))
    book.slots.reserve(SessionId(1), claims, 0, 10**12)
    book.slots.prompt_comes(claims, 250, 0)  # three chunks of 1.1 ms, each with a step of 4
    assert device.timeline.with_steps(0, 10 * MS) == 10 * MS + 5_100_000
    until = round(3 * 5.1 * MS)
    assert device.timeline.with_steps(until - 1, 10 * MS) == 10 * MS + 5_100_000
    assert device.timeline.with_steps(until, 10 * MS) == 14 * MS
    book.slots.release(SessionId(1))
    assert not device.timeline.has_steps


def test_a_step_waits_for_one_batch_at_most_and_for_less_where_batches_are_rare() -> None:
    book, cache, device = shared()
    claims = SlotClaims((cache,), (BLOCKS,))
    book.slots.reserve(SessionId(1), claims, 0, 10**12)
    assert book.slots.wait_ns(claims, 0) == 0.0
    for start in range(0, 10_000 * MS, 20 * MS):  # half of the time
        device.computed(start, start + 10 * MS)
    now = 9_990 * MS
    assert device.load(now) == pytest.approx(0.5, rel=0.02)
    assert book.slots.wait_ns(claims, now) == pytest.approx(4 * MS, rel=0.05)
    for start in range(10_000 * MS, 30_000 * MS, 10 * MS):  # all of it
        device.computed(start, start + 10 * MS)
    assert book.slots.wait_ns(claims, 30_000 * MS) == pytest.approx(10 * MS, rel=0.01)
    assert device.load(60_000 * MS) < 0.001  # and nothing once they have ended


def test_of_two_alike_devices_the_one_without_sessions_takes_the_batch() -> None:
    book, cache, _ = shared()
    pool = Pool([book.member(agent("a")), book.member(agent("b"))])
    book.follow([pool])
    route = PoolChain([ProbeStage(pool, COMPUTE, 0)])
    book.slots.reserve(SessionId(1), SlotClaims((cache,), (BLOCKS,)), 0, 10**12)
    path = book.probe(route, 1, 0)
    assert (path.steps[0].member.agent, path.finish_ns, path.wait_ns) == ("b", COMPUTE[0], 0)
    book.reserve(BatchId(1), path.steps, 10**12)
    path = book.probe(route, 1, 0)  # waiting for b would end later than sharing a
    assert (path.steps[0].member.agent, path.finish_ns) == ("a", COMPUTE[0] + 4 * MS)
