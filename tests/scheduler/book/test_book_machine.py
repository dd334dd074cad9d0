"""The book under any order of its verbs: no overlap, nothing lost, a journal that tells all."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary_scheduler.book import Book, Pool, PoolChain, ProbeStage, Reservation
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    ResourceId,
    ServerId,
)
from catenary_services.domain.plan import Agent

Key = tuple[BatchId, int, ResourceId]


def key_of(record: Reservation) -> Key:
    return (record.batch, record.position, record.resource)


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        members = [
            self.book.member(
                Agent(AgentId(f"a{i}"), "x", ServerId(f"s{i // 2}"), 1, NANOSECONDS_PER_SECOND)
            )
            for i in range(6)
        ]
        pools = [Pool(members[0:2]), Pool(members[1:4]), Pool(members[3:6])]
        self.book.follow(pools)
        self.legs = tuple(
            ProbeStage(pool, (5, 6, 8), 2 if i else 0) for i, pool in enumerate(pools)
        )
        self.now = 0
        self.batches = 0
        self.expected: dict[Key, tuple[int, int]] = {}
        """Uses not reported yet: latest known start and the booked duration."""
        self.begun: set[Key] = set()
        """Uses whose real start is known."""
        self.journal: dict[Key, Reservation] = {}

    def open_batches(self) -> list[BatchId]:
        return sorted({batch for batch, _, _ in self.expected})

    def forget(self, batch: BatchId) -> None:
        self.expected = {key: v for key, v in self.expected.items() if key[0] != batch}

    @rule(rows=st.integers(1, 3), first=st.integers(0, 2), expiry=st.integers(0, 80))
    def reserve(self, rows: int, first: int, expiry: int) -> None:
        path = self.book.probe(PoolChain(self.legs[first:]), rows, self.now)
        self.batches += 1
        batch = BatchId(self.batches)
        self.book.reserve(batch, path.steps, path.finish_ns + expiry)
        for record in self.book.snapshot():
            if record.batch == batch:
                self.expected[key_of(record)] = (record.start_ns, record.end_ns - record.start_ns)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), early=st.integers(-12, 12), length=st.integers(0, 25))
    def correct(self, data: st.DataObject, early: int, length: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        batch, position, resource = key
        transfer = not resource.startswith("gpu/")
        booked_start, booked_length = self.expected[key]
        start = max(0, booked_start + early)
        correction = self.book.correct(batch, position, start, start + length, transfer=transfer)
        assert correction is not None
        assert correction.drift_ns == start + max(1, length) - booked_start - booked_length
        for other in list(self.expected):
            same_hop = other[1] == position and other[2].startswith("gpu/") != transfer
            ahead = other[1] < position or (
                other[1] == position and not transfer and not other[2].startswith("gpu/")
            )
            if other[0] == batch and (same_hop or ahead):
                del self.expected[other]
        again = self.book.correct(batch, position, start, start + length, transfer=transfer)
        assert again is None

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), early=st.integers(-12, 12))
    def begin(self, data: st.DataObject, early: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        batch, position, resource = key
        transfer = not resource.startswith("gpu/")
        length = self.expected[key][1]
        start = max(0, self.expected[key][0] + early)
        assert self.book.correct(batch, position, start, None, transfer=transfer) is not None
        for other in list(self.expected):
            links_of_hop = other[1] == position and not other[2].startswith("gpu/")
            if other[0] == batch and (other[1] < position or (links_of_hop and not transfer)):
                del self.expected[other]
        records = {key_of(r): r for r in self.book.snapshot()}
        assert records[key].start_ns >= start
        assert records[key].end_ns - records[key].start_ns == length
        its = {k for k in self.expected if k[:2] == key[:2] and k[2].startswith("gpu/") != transfer}
        lines = {k[2] for k in its}
        beside = {k for k in self.begun if k in self.expected and k[2] in lines}
        for known in its | {k for k in self.expected if (k[0], k[1]) in {b[:2] for b in beside}}:
            record = records[known]
            assert known in its or record.end_ns - record.start_ns <= self.expected[known][1]
            self.expected[known] = (record.start_ns, record.end_ns - record.start_ns)
        self.begun |= its

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.open_batches()))
        assert self.book.release(batch)
        assert not self.book.release(batch)
        self.forget(batch)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), later=st.integers(0, 50))
    def confirm(self, data: st.DataObject, later: int) -> None:
        self.book.confirm(data.draw(st.sampled_from(self.open_batches())), self.now + later)

    @rule(step=st.integers(1, 30))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.book.prune(self.now)
        for batch in self.book.expire(self.now):
            assert batch not in self.book
            self.forget(batch)
        moment = self.book.next_expiry()
        assert moment is None or moment > self.now

    @rule()
    def write_behind(self) -> None:
        for change in self.book.take_changes():
            if change.op == "put":
                self.journal[key_of(change.reservation)] = change.reservation
            else:
                del self.journal[key_of(change.reservation)]
        assert self.journal == {key_of(r): r for r in self.book.snapshot()}
        assert not self.book.take_changes()

    @rule()
    def another_scheduler_takes_over(self) -> None:
        snapshot = self.book.snapshot()
        other = Book()
        other.restore(reversed(snapshot))
        assert set(other.snapshot()) == set(snapshot)
        for batch in {record.batch for record in snapshot}:
            assert other.last_position(batch) == self.book.last_position(batch)

    @invariant()
    def nothing_overlaps(self) -> None:
        lines = defaultdict(list)
        for record in self.book.snapshot():
            assert record.start_ns < record.end_ns
            lines[record.resource].append((record.start_ns, record.end_ns))
        for intervals in lines.values():
            intervals.sort()
            for (_, end), (start, _) in itertools.pairwise(intervals):
                assert end <= start

    @invariant()
    def nothing_is_lost_or_shortened_and_nothing_moves_forward(self) -> None:
        here = {key_of(r): r for r in self.book.snapshot() if not r.done}
        assert here.keys() == self.expected.keys()
        for key, record in here.items():
            start, length = self.expected[key]
            assert record.end_ns - record.start_ns == length
            assert record.start_ns >= start
            self.expected[key] = (record.start_ns, length)

    @invariant()
    def a_batch_uses_one_thing_after_the_other(self) -> None:
        uses = defaultdict(set)
        for record in self.book.snapshot():
            kind = record.resource.startswith("gpu/")
            uses[record.batch].add(
                (record.position, kind, record.start_ns, record.end_ns, record.done)
            )
        for chain in uses.values():
            ordered = sorted(chain)
            # One entry per use: both links of a transfer have the same interval.
            assert len({use[:2] for use in ordered}) == len(ordered)
            for before, after in itertools.pairwise(ordered):
                assert after[4] or before[3] <= after[2]

    @invariant()
    def pools_are_in_order(self) -> None:
        for leg in self.legs:
            pool = leg.pool
            assert pool.free_moments() == [m.gpu.busy_until for m in pool.members]


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBookMachine = BookMachine.TestCase
