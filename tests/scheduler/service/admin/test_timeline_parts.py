from __future__ import annotations

import pytest

from catenary_scheduler.dispatch.events import DispatchBatch, PlannedHop, StageReported
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.timelines import LONGEST_NS, Timelines
from catenary_services.domain.ids import AgentId, BatchId, ModelKey, PartitionKey

A, B = AgentId("a"), AgentId("b")
MODEL = ModelKey("m", "1")
S = 10**9


def batch(number: int, start: int) -> DispatchBatch:
    parts = [PartitionKey(MODEL, at, at + 1) for at in range(2)]
    hops = (
        PlannedHop(A, parts[0], start, 10),
        PlannedHop(B, parts[1], start + 15, 10, start + 10, 5),
    )
    return DispatchBatch(BatchId(number), 4, (), hops, start + 25)


def test_a_batch_is_shown_as_it_was_booked_and_as_it_ran() -> None:
    lines = Timelines()
    lines.dispatched(batch(1, 100), 90)
    assert lines.reported(StageReported(BatchId(1), 1, 130, 145, 112, 120)) is not None
    [entry] = lines.batches()
    assert [(use.kind, use.agent, use.sender, use.booked, use.real) for use in entry.uses()] == [
        ("gpu", A, None, (100, 110), None),
        ("link", B, A, (110, 115), (112, 120)),
        ("gpu", B, None, (115, 125), (130, 145)),
    ]


def test_what_nobody_dispatched_here_is_not_compared() -> None:
    lines = Timelines()
    lines.dispatched(batch(1, 100), 90)
    assert lines.reported(StageReported(BatchId(2), 0, 1, 2)) is None
    assert lines.reported(StageReported(BatchId(1), 2, 1, 2)) is None


def test_memory_is_bounded_by_time_and_by_number() -> None:
    lines = Timelines(most_batches=10)
    for number in range(8):
        lines.dispatched(batch(number, number * 100), number * 100)
    assert len(lines.batches()) == 8
    assert lines.is_complete(0)
    lines.dispatched(batch(8, LONGEST_NS + 350), LONGEST_NS + 350)
    assert [entry.command.batch for entry in lines.batches()] == [4, 5, 6, 7, 8]
    for number in range(9, 15):
        lines.dispatched(batch(number, LONGEST_NS + 350), LONGEST_NS + 350)
    assert len(lines.batches()) == 10
    assert BatchId(4) not in lines
    assert not lines.is_complete(0)
    assert lines.is_complete(426)


def test_generating_is_laid_out_without_overlap() -> None:
    lines = Timelines(most_spans=3)
    other = ModelKey("n", "1")
    lines.generated(A, MODEL, 2 * S, 50 * S)
    lines.generated(A, MODEL, 2 * S, 51 * S)  # more than the time since: what was before is taken
    lines.generated(A, MODEL, 3 * S // 10, 52 * S)
    lines.generated(A, other, 4 * S // 10, 52 * S)
    lines.generated(A, other, 0, 53 * S)
    assert [(use.model, use.real) for use in lines.spans()] == [
        (MODEL, (50 * S, 51 * S)),
        (MODEL, (517 * S // 10, 52 * S)),
        (other, (513 * S // 10, 517 * S // 10)),
    ]
    assert all(use.batch == 0 and use.booked is None for use in lines.spans())


def test_the_slowdown_is_real_by_booked_time_of_late() -> None:
    slow = Slowdowns()
    assert slow.ratio(A, 0) == 0
    for at in range(3):
        slow.reported(A, 300, 100, at * S)
    slow.reported(B, 100, 100, 0)
    assert slow.ratio(A, 3 * S) == 3
    assert slow.ratio(B, 3 * S) == 0, "one report is not enough"
    slow.reported(A, 100, 900, 3 * S)
    assert slow.ratio(A, 3 * S) == pytest.approx(1000 / 1200)
    assert slow.ratio(A, 60 * S) == 0, "nothing was heard for long"
    for at in range(1000):
        slow.reported(A, 200, 100, 60 * S + at)
    assert slow.ratio(A, 60 * S + 1000) == 2
    slow.forget(A)
    assert slow.ratio(A, 60 * S + 1000) == 0


def test_a_report_of_nothing_says_nothing() -> None:
    slow = Slowdowns()
    for _ in range(5):
        slow.reported(A, 100, 0, 0)
    assert slow.ratio(A, 0) == 0
