"""The baseline without reservations, one policy at a time, with a clock that steps."""

from __future__ import annotations

import pytest

from catenary_lab.pools.reactive import ReactiveDispatcher
from catenary_scheduler.dispatch import PooledConfig
from catenary_scheduler.dispatch.events import (
    AgentLost,
    BatchFailed,
    Command,
    DispatchBatch,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
)
from catenary_services.domain.plan import Pipeline
from scheduling_cases.pipelines import CATS, MS, joins, pipeline, plan, request, served, stage

CONFIG = PooledConfig(max_linger_ns=None, safety_margin_ns=0)


# 10 ms for one row and 15 for two, on "a" or "b"; 1 ms a row over the link; then the same on "c".
TWO_STAGES = pipeline(2, stage(0, "ab", 10, 15), stage(1, "c", 10, 15, row_bytes=1_000_000))


def dispatcher(*pipelines: Pipeline, agents: str = "abc") -> ReactiveDispatcher:
    made = ReactiveDispatcher(CONFIG)
    for name in agents:
        made.handle(joins(name), 0)
    made.handle(PlanActivated(plan(served(*pipelines))), 0)
    return made


def arrive(
    at: ReactiveDispatcher, number: int, now_ms: float, deadline_ms: float, rows: int = 1
) -> list[Command]:
    arrived = RequestArrived(request(number), CATS, rows, round(deadline_ms * MS))
    return at.handle(arrived, round(now_ms * MS))


def report(
    at: ReactiveDispatcher, order: Command, end_ms: float, now_ms: float | None = None
) -> list[Command]:
    assert isinstance(order, DispatchBatch)
    end = round(end_ms * MS)
    event = StageReported(order.batch, 0, end - order.path[0].duration_ns, end)
    return at.handle(event, end if now_ms is None else round(now_ms * MS))


def tick(at: ReactiveDispatcher) -> list[Command]:
    moment = at.next_wakeup()
    assert moment is not None
    return at.handle(Tick(), moment)


def sent(commands: list[Command]) -> list[tuple[str, int, list[int]]]:
    """Agent, stage and requests of every batch."""
    return [
        (
            each.path[0].agent,
            each.path[0].partition.first_block,
            [part.request.number for part in each.slices],
        )
        for each in commands
        if isinstance(each, DispatchBatch)
    ]


def test_a_full_batch_goes_to_the_earliest_free_gpu_at_once() -> None:
    at = dispatcher(TWO_STAGES)
    assert sent(arrive(at, 1, 0, 100, rows=2)) == [("a", 0, [1, 1])]
    assert sent(arrive(at, 2, 1, 100, rows=2)) == [("b", 0, [2, 2])]
    assert sent(arrive(at, 3, 2, 100, rows=2)) == [("a", 0, [3, 3])]  # free at 15, "b" at 16


def test_too_few_rows_wait_for_the_last_moment_at_which_one_more_would_be_in_time() -> None:
    at = dispatcher(TWO_STAGES)
    assert arrive(at, 1, 0, 100) == []
    # Two rows take 15 ms here and, as planned, 2 + 15 later.
    assert at.next_wakeup() == (100 - 17 - 15) * MS
    assert sent(tick(at)) == [("a", 0, [1])]


def test_the_batch_shrinks_to_what_leaves_the_later_stages_their_planned_time() -> None:
    at = dispatcher(TWO_STAGES)
    # 15 + 17 ms are planned for two, 10 + 17 for one here.
    assert sent(arrive(at, 1, 0, 31.9, rows=2)) == [("a", 0, [1]), ("b", 0, [1])]


def test_a_row_whose_batch_of_one_would_be_late_is_dropped() -> None:
    at = dispatcher(TWO_STAGES)
    (drop,) = arrive(at, 1, 0, 26.9)
    assert isinstance(drop, Reject)
    assert drop.reason == "SLO_UNATTAINABLE"
    assert at.statistics()["open_requests"] == 0


def test_the_next_stage_is_decided_only_when_rows_are_there_and_batches_anew() -> None:
    at = dispatcher(TWO_STAGES)
    assert arrive(at, 1, 0, 33) == []
    (first,) = tick(at)  # at 33 - 32 = 1 ms
    (second,) = arrive(at, 2, 1, 28.5)
    assert sent([first, second]) == [("a", 0, [1]), ("b", 0, [2])]
    # Alone, row 1 waits until 33 - 17 = 16 ms for a second one; row 2 is it.
    assert sent(report(at, first, 11.2)) == []
    assert sent(report(at, second, 11.4)) == [("c", 1, [2, 1])]


def test_the_most_urgent_row_goes_first_and_links_are_taken_to_be_free() -> None:
    at = dispatcher(pipeline(1, stage(0, "a", 10), stage(1, "c", 10, row_bytes=1_000_000)))
    (first,) = arrive(at, 1, 0, 100)
    (then,) = report(at, first, 10)
    assert isinstance(then, DispatchBatch)
    assert then.path[0].start_ns == 11 * MS
    assert then.expected_finish_ns == 21 * MS
    assert sent(arrive(at, 2, 10, 200)) == [("a", 0, [2])]


def test_a_gpu_that_is_late_is_known_to_be_late() -> None:
    at = dispatcher(pipeline(1, stage(0, "ab", 10)))
    (one,) = arrive(at, 1, 0, 100)
    (two,) = arrive(at, 2, 1, 100)
    (three,) = arrive(at, 3, 2, 100)
    assert sent([one, two, three]) == [("a", 0, [1]), ("b", 0, [2]), ("a", 0, [3])]
    report(at, two, 11)
    report(at, one, 18)  # row 3 follows until 28
    assert sent(arrive(at, 4, 18, 100)) == [("b", 0, [4])]
    assert sent(arrive(at, 5, 18, 28.1)) == []  # "b" is busy until 28 as well
    assert at.statistics()["rejected_requests"] == 1


def test_of_several_pipelines_the_one_with_the_shortest_wait_is_taken() -> None:
    at = dispatcher(
        pipeline(1, stage(0, "a", 10)),
        pipeline(1, stage(0, "b", 30)),
    )
    assert sent(arrive(at, 1, 0, 100)) == [("a", 0, [1])]
    assert sent(arrive(at, 2, 0, 100)) == [("b", 0, [2])]
    assert sent(arrive(at, 3, 0, 100)) == [("a", 0, [3])]
    assert sent(arrive(at, 4, 0, 35)) == [("a", 0, [4])]  # 40 ms on "b" would be too late


def test_completed_and_cancelled_requests_are_forgotten() -> None:
    at = dispatcher(TWO_STAGES)
    arrive(at, 1, 0, 100)
    at.handle(RequestCancelled(request(1)), MS)
    assert at.statistics()["queued_rows"] == 0
    (order,) = arrive(at, 2, 1, 100, rows=2)
    at.handle(RequestCompleted(request(2)), 2 * MS)
    assert report(at, order, 16) == []
    assert at.statistics()["open_requests"] == 0
    assert at.next_wakeup() is None


def test_a_request_without_a_result_is_answered_after_its_deadline() -> None:
    at = dispatcher(TWO_STAGES)
    arrive(at, 1, 0, 100, rows=2)
    assert at.next_wakeup() == 100 * MS + CONFIG.deadline_grace_ns
    (answer,) = tick(at)
    assert isinstance(answer, Reject)
    assert answer.reason == "DEADLINE_EXCEEDED"


def test_what_a_lost_agent_held_starts_again() -> None:
    at = dispatcher(TWO_STAGES)
    (first,) = arrive(at, 1, 0, 200, rows=2)
    (second,) = arrive(at, 2, 0, 200, rows=2)
    report(at, first, 15)
    # "c" has rows of 1; "b" still computes those of 2.
    assert sent(at.handle(AgentLost(AgentId("b")), 16 * MS)) == [("a", 0, [2, 2])]
    assert report(at, second, 17) == []  # nobody waits for that any more
    commands = at.handle(AgentLost(AgentId("c")), 18 * MS)
    # Without a second stage no pipeline is whole: nothing can be done for either.
    assert {each.reason for each in commands if isinstance(each, Reject)} == {"NO_ACTIVE_PLAN"}
    assert at.statistics()["open_requests"] == 1  # the batch of 2 on "a"


def test_rows_start_again_under_a_new_plan() -> None:
    at = dispatcher(TWO_STAGES)
    arrive(at, 1, 0, 100)
    other = plan(served(pipeline(1, stage(0, "c", 5))), name="q")
    assert sent(at.handle(PlanActivated(other), MS)) == [("c", 0, [1])]


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failed_batch_is_tried_again_if_that_can_help(retryable: bool) -> None:
    at = dispatcher(TWO_STAGES)
    (order,) = arrive(at, 1, 0, 100, rows=2)
    assert isinstance(order, DispatchBatch)
    failure = BatchFailed(order.batch, AgentId("a"), "INTERNAL", "broken", retryable)
    commands = at.handle(failure, MS)
    if retryable:
        assert sent(commands) in ([("a", 0, [1, 1])], [("b", 0, [1, 1])])
    else:
        (answer,) = commands
        assert isinstance(answer, Reject)
        assert answer.reason == "INTERNAL"


def test_work_is_given_up_after_enough_attempts() -> None:
    at = dispatcher(TWO_STAGES)
    commands = arrive(at, 1, 0, 1000, rows=2)
    for _ in range(CONFIG.max_attempts):
        (order,) = commands
        assert isinstance(order, DispatchBatch)
        commands = at.handle(BatchFailed(order.batch, None, "LOST", "gone", True), MS)
    (answer,) = commands
    assert isinstance(answer, Reject)
    assert answer.reason == "PARTITION_LOST"


def test_without_a_plan_nothing_is_accepted() -> None:
    at = ReactiveDispatcher()
    (answer,) = arrive(at, 1, 0, 100)
    assert isinstance(answer, Reject)
    assert answer.reason == "NO_ACTIVE_PLAN"


def test_decisions_are_timed_with_a_stopwatch() -> None:
    moments = iter(range(0, 1000, 7))
    at = ReactiveDispatcher(CONFIG, stopwatch=lambda: next(moments))
    at.handle(joins("a"), 0)
    at.handle(PlanActivated(plan(served(pipeline(2, stage(0, "a", 1))))), 0)
    arrive(at, 1, 0, 100)
    assert at.take_decision_times() == [7]
    assert at.take_decision_times() == []


def test_batch_numbers_are_unique() -> None:
    at = dispatcher(TWO_STAGES)
    orders = [arrive(at, n, n, 1000, rows=2)[0] for n in range(3)]
    assert [each.batch for each in orders if isinstance(each, DispatchBatch)] == [
        BatchId(1),
        BatchId(2),
        BatchId(3),
    ]
