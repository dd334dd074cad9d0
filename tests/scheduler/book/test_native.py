"""The compiled probe against its plain twin, on the same random book, to the last tie."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.book import pool, probe, timeline
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, BatchId, ResourceId
from catenary_services.errors import InternalError

native: ModuleType = pytest.importorskip(
    "catenary_scheduler.book._native", reason="the compiled modules were not built (make native)"
)


STEPS = st.one_of(
    st.just((0, 0, 0, 0)),
    st.tuples(st.integers(0, 6), st.integers(0, 4096), st.integers(0, 9), st.integers(0, 60)),
)
"""Arguments of `take_steps`."""


class Side:
    """The same cluster, made of the classes of one of the twins."""

    def __init__(self, classes: Any, probing: Any, lines: Any, shape: tuple[Any, ...]) -> None:
        servers, speeds, pools, legs = shape
        self.lines = lines
        self.probing = probing
        make = lines.Timeline
        self.links = {
            (kind, server): make(ResourceId(f"{kind}/{server}"))
            for kind in ("up", "down")
            for server in set(servers)
        }
        self.gpus = [make(ResourceId(f"gpu/{i}")) for i in range(len(servers))]
        members = [
            classes.PoolMember(
                AgentId(f"a{i}"), self.gpus[i], self.links["up", s], self.links["down", s], speed
            )
            for i, (s, speed) in enumerate(zip(servers, speeds, strict=True))
        ]
        self.pools = [classes.Pool([members[i] for i in chosen]) for chosen in pools]
        for each in self.pools:
            each.attach()
        self.chain = probing.PoolChain(
            [
                probe.ProbeStage(self.pools[at], compute, nbytes)
                for at, (compute, nbytes) in enumerate(legs)
            ]
        )
        self.booked: list[list[Any]] = []

    def path(self, rows: int, now: int) -> tuple[Any, ...]:
        return self.plain(self.chain.probe(rows, now))

    def largest(self, deadline: int, now: int) -> tuple[Any, ...] | None:
        path = self.chain.largest(4, deadline, now)
        return None if path is None else self.plain(path)

    def earliest_starts(self, ready: int, duration: int) -> list[int]:
        return [each.earliest_start(ready, duration) for each in self.pools]

    @staticmethod
    def plain(path: Any) -> tuple[Any, ...]:
        steps = [
            (s.member.agent, s.transfer_start, s.transfer_ns, s.start, s.compute_ns)
            for s in path.steps
        ]
        return path.rows, path.finish_ns, path.wait_ns, steps

    def reserve(self, rows: int, now: int) -> None:
        uses = self.probing.uses_of(BatchId(1), self.chain.probe(rows, now).steps)
        for use in uses:
            for line in use.timelines:
                line.insert(use)
        self.booked.append(uses)

    def release(self, which: int) -> None:
        for use in self.booked.pop(which % len(self.booked)):
            for line in use.timelines:
                line.remove(use)

    def mend(self, which: int, early: int, late: int) -> None:
        """The first use of a batch really was at another time, if nothing is in the way."""
        use = self.booked[which % len(self.booked)][0]
        start, end = max(0, use.start - early), use.end + late
        if all(line.alone(use, start, end) for line in use.timelines):
            for line in use.timelines:
                line.resize(use, start, end)
                line.ran_until(end)
            use.start, use.end = start, end

    def generate(self, which: int, steps: tuple[int, int, int, int]) -> None:
        """A device computes steps of language models from now on, or none."""
        self.gpus[which % len(self.gpus)].take_steps(*steps)

    def state(self) -> list[Any]:
        lines = [*self.gpus, *self.links.values()]
        return [
            [(list(one.starts), list(one.ends), one.busy_until, one.done_until) for one in lines],
            [(each.free_moments(), list(each.order)) for each in self.pools],
            [each.sharing for each in self.pools],
            [one.with_steps(ready, 7) for one in self.gpus for ready in (0, 20, 40)],
        ]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Any, ...]:
    count = draw(st.integers(1, 8))
    servers = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    speed = st.sampled_from([NANOSECONDS_PER_SECOND, 2 * NANOSECONDS_PER_SECOND, 700_000_001])
    speeds = draw(st.lists(speed, min_size=count, max_size=count))
    stages = draw(st.integers(1, 3))
    members = st.lists(st.integers(0, count - 1), min_size=1, unique=True)
    pools = [draw(members) for _ in range(stages)]
    legs = []
    for position in range(stages):
        base, step = draw(st.integers(1, 8)), draw(st.integers(0, 3))
        nbytes = draw(st.integers(0, 4)) if position else 0
        legs.append((tuple(base + step * i for i in range(4)), nbytes))
    return servers, speeds, pools, tuple(legs)


@settings(max_examples=250, deadline=None)
@given(shapes(), st.data())
def test_both_twins_find_the_same_paths_in_the_same_book(
    shape: tuple[Any, ...], data: st.DataObject
) -> None:
    plain = Side(pool, probe, timeline, shape)
    compiled = Side(native, native, native, shape)
    assert plain.chain.least_work_ns == compiled.chain.least_work_ns
    now = 0
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.integers(0, 4))
        rows, deadline = data.draw(st.integers(1, 4)), now + data.draw(st.integers(0, 60))
        assert plain.path(rows, now) == compiled.path(rows, now)
        assert plain.largest(deadline, now) == compiled.largest(deadline, now)
        assert plain.earliest_starts(deadline, rows) == compiled.earliest_starts(deadline, rows)
        actions = ["reserve", "reserve", "reserve", "release", "mend", "generate"]
        action = data.draw(st.sampled_from(actions))
        steps = data.draw(STEPS)
        which, early, late = (data.draw(st.integers(0, 9)) for _ in range(3))
        for side in (plain, compiled):
            if action == "reserve":
                side.reserve(rows, now)
            elif action == "generate":
                side.generate(which, steps)
            elif side.booked and action == "release":
                side.release(which)
            elif side.booked:
                side.mend(which, early, late)
        assert plain.state() == compiled.state()


def test_a_compiled_timeline_refuses_a_double_booking_and_stays_as_it_was() -> None:
    line = native.Timeline(ResourceId("gpu/a"))
    line.insert(native.BookedInterval(BatchId(1), 0, (line,), 10, 20))
    for start, end in ((5, 11), (19, 25), (12, 14), (5, 30)):
        with pytest.raises(InternalError, match="booked twice at 10"):
            line.insert(native.BookedInterval(BatchId(2), 0, (line,), start, end))
    assert (line.starts, line.ends) == ([10], [20])


def test_a_compiled_timeline_grows_beyond_its_first_room() -> None:
    line = native.Timeline(ResourceId("gpu/a"))
    for i in reversed(range(100)):
        line.insert(native.BookedInterval(BatchId(i), 0, (line,), 10 * i, 10 * i + 4))
    assert line.starts == [10 * i for i in range(100)]
    assert native.earliest_slot([line], 0, 6) == 4
    assert native.earliest_slot([line], 0, 7) == 994


def test_a_batch_larger_than_planned_is_an_error_in_both_twins() -> None:
    shape = ([0], [1], [[0]], (((5, 6), 0),))
    for side in (Side(pool, probe, timeline, shape), Side(native, native, native, shape)):
        for rows in (0, 3):
            with pytest.raises(IndexError, match="planned are 1 to 2"):
                side.chain.probe(rows, 0)
