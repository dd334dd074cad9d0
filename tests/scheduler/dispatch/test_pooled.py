"""Policies of the pooled dispatcher, one at a time, with a clock that steps."""

from __future__ import annotations

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    AgentJoined,
    AgentLost,
    BatchFailed,
    CancelBatch,
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
    GatewayId,
    ModelKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, ModelPlan, Plan
from scheduling_cases.pipelines import CATS, DOGS, MS, joins, pipeline, plan, request, served, stage

PAPER = PooledConfig(max_linger_ns=None)


class Bench:
    """A dispatcher, a clock and short names."""

    def __init__(self, config: PooledConfig | None, *models: ModelPlan, agents: str = "ab") -> None:
        self.dispatcher = PooledDispatcher(config)
        self.number = 0
        for agent in agents:
            self.tell(0, joins(agent))
        if models:
            self.tell(0, PlanActivated(plan(*models)))

    def tell(self, ms: float, event: object) -> list[Command]:
        return self.dispatcher.handle(event, int(ms * MS))  # type: ignore[arg-type]

    def ask(
        self, ms: float, rows: int = 1, slo: float = 100, which: ModelKey = CATS, priority: int = 0
    ) -> list[Command]:
        self.number += 1
        return self.tell(
            ms, RequestArrived(request(self.number), which, rows, int((ms + slo) * MS), priority)
        )

    def wake(self) -> tuple[float, list[Command]]:
        moment = self.dispatcher.next_wakeup()
        assert moment is not None
        return moment / MS, self.dispatcher.handle(Tick(), moment)


def only(commands: list[Command]) -> DispatchBatch:
    (command,) = commands
    assert isinstance(command, DispatchBatch)
    return command


def refused(commands: list[Command]) -> Reject:
    (command,) = commands
    assert isinstance(command, Reject)
    return command


def rows_of(batch: DispatchBatch) -> list[tuple[int, int, int, int]]:
    return [(s.request.number, s.request_row, s.rows, s.batch_row) for s in batch.slices]


ONE_STAGE = served(pipeline(4, stage(0, "a", 10, 12, 14, 16)))
TWO_STAGES = served(pipeline(2, stage(0, "ab", 10, 12), stage(1, "cd", 10, 12, row_bytes=MS)))


def test_a_full_batch_leaves_at_once_with_its_whole_path_booked() -> None:
    bench = Bench(None, TWO_STAGES, agents="abcd")
    batch = only(bench.ask(0, rows=2))
    assert [hop.start_ns / MS for hop in batch.path] == [0, 14]
    assert batch.expected_finish_ns == 26 * MS
    booked = {(r.resource, r.start_ns // MS, r.end_ns // MS) for r in bench.dispatcher.snapshot()}
    first, second = batch.path[0].agent, batch.path[1].agent
    assert booked == {
        (f"gpu/{first}", 0, 12),
        (f"uplink/{first}", 12, 14),
        (f"downlink/{second}", 12, 14),
        (f"gpu/{second}", 14, 26),
    }


def test_a_request_is_split_over_batches_and_a_batch_mixes_requests() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    first = only(bench.ask(0, rows=6))
    assert rows_of(first) == [(1, 0, 4, 0)]
    second = only(bench.ask(1, rows=2))
    assert rows_of(second) == [(1, 4, 2, 0), (2, 0, 2, 2)]


def test_a_lone_request_lingers_no_longer_than_configured() -> None:
    bench = Bench(None, ONE_STAGE)
    assert bench.ask(0) == []
    moment, commands = bench.wake()
    assert moment == 2
    assert only(commands).rows == 1


def test_without_linger_rows_wait_until_the_last_safe_moment() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    assert bench.ask(0, slo=50) == []
    moment, commands = bench.wake()
    assert moment == 50 - 12 - 1  # room for one more row, and the safety margin
    assert only(commands).expected_finish_ns <= 50 * MS


def test_rows_keep_gathering_while_every_device_is_busy() -> None:
    bench = Bench(None, ONE_STAGE)
    only(bench.ask(0, rows=4))
    assert bench.ask(1) == []
    moment, commands = bench.wake()
    assert moment == 16 - 2  # the device is free at 16, frames take up to 2
    assert commands == [] or only(commands).path[0].start_ns == 16 * MS


def test_the_batch_shrinks_until_the_oldest_deadline_is_met() -> None:
    bench = Bench(PAPER, served(pipeline(4, stage(0, "ab", 10, 12, 14, 16))))
    batches = bench.ask(0, rows=4, slo=13)
    assert [only([batch]).rows for batch in batches] == [2, 2]
    assert {only([batch]).expected_finish_ns for batch in batches} == {12 * MS}


def test_an_unattainable_deadline_is_refused_with_the_earliest_finish() -> None:
    bench = Bench(None, ONE_STAGE)
    only(bench.ask(0, rows=4))
    reject = refused(bench.ask(1, slo=20))
    assert reject.reason == "SLO_UNATTAINABLE"
    assert reject.earliest_finish_ns == 26 * MS
    assert reject.retry_after_ns == 5 * MS
    hopeless = refused(bench.ask(30, slo=9))
    assert hopeless.reason == "SLO_UNATTAINABLE"
    assert hopeless.retry_after_ns is None


def test_the_pipeline_with_the_least_waiting_is_taken() -> None:
    plan = served(pipeline(1, stage(0, "a", 10)), pipeline(1, stage(0, "b", 30)))
    bench = Bench(None, plan)
    assert [only(bench.ask(0)).path[0].agent for _ in range(3)] == ["a", "b", "a"]


def test_another_pipeline_is_tried_before_a_request_is_dropped() -> None:
    plan = served(pipeline(1, stage(0, "a", 10)), pipeline(1, stage(0, "b", 30)))
    bench = Bench(None, plan)
    only(bench.ask(0))
    assert only(bench.ask(0, slo=20)).path[0].agent == "a"  # b waits less but is too slow


def test_priority_goes_first_then_the_deadline() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    bench.ask(0, slo=90)
    bench.ask(0, slo=60)
    bench.ask(0, slo=95, priority=1)
    batch = only(bench.ask(0, slo=70))
    assert [number for number, *_ in rows_of(batch)] == [3, 2, 4, 1]


def test_two_models_share_one_book() -> None:
    dogs = served(pipeline(1, stage(0, "a", 20, model=DOGS)))
    bench = Bench(None, served(pipeline(1, stage(0, "a", 10))), dogs)
    only(bench.ask(0))
    batch = only(bench.ask(0, which=DOGS))
    assert batch.path[0].start_ns == 10 * MS


def test_a_full_queue_refuses_more() -> None:
    bench = Bench(PooledConfig(max_linger_ns=None, max_queued_rows=3), ONE_STAGE)
    assert bench.ask(0, rows=2) == []
    reject = refused(bench.ask(0, rows=2))
    assert reject.reason == "OVERLOADED"
    assert reject.retry_after_ns


def test_a_lost_agent_s_batch_goes_another_way_with_its_old_deadline() -> None:
    bench = Bench(None, TWO_STAGES, agents="abcd")
    batch = only(bench.ask(0, rows=2))
    lost, second = batch.path[0].agent, batch.path[1].agent
    cancel, again = bench.tell(5, AgentLost(lost))
    assert cancel == CancelBatch(batch.batch, (second,))
    assert isinstance(again, DispatchBatch)
    assert again.batch != batch.batch
    assert again.path[0].agent not in (lost, None)
    assert rows_of(again) == rows_of(batch)
    assert {r.batch for r in bench.dispatcher.snapshot()} == {again.batch}


def test_losing_an_agent_a_batch_has_passed_costs_nothing() -> None:
    bench = Bench(None, TWO_STAGES, agents="abcd")
    batch = only(bench.ask(0, rows=2))
    bench.tell(12, StageReported(batch.batch, 0, 0, 12 * MS))
    bench.tell(26, StageReported(batch.batch, 1, 14 * MS, 26 * MS))
    assert bench.tell(26, AgentLost(batch.path[0].agent)) == []
    assert bench.dispatcher.snapshot() == []


def overdue_twice() -> tuple[Bench, DispatchBatch]:
    config = PooledConfig(overdue_grace_ns=MS)
    bench = Bench(config, served(pipeline(1, stage(0, "a", 10))))
    batch = only(bench.ask(0, slo=1000))
    for _ in range(2):
        _, (cancel, again) = bench.wake()
        assert cancel == CancelBatch(batch.batch, (AgentId("a"),))
        assert isinstance(again, DispatchBatch)
        batch = again
    moment, commands = bench.wake()
    assert commands == []
    assert moment < 1000
    assert bench.dispatcher.snapshot() == []
    return bench, batch


def test_an_overdue_batch_is_dispatched_again_and_the_last_one_has_until_the_deadline() -> None:
    bench, batch = overdue_twice()
    moment, (reject, cancel) = bench.wake()
    assert moment == 1000 + 50
    assert cancel == CancelBatch(batch.batch, (AgentId("a"),))
    assert isinstance(reject, Reject)
    assert reject.reason == "DEADLINE_EXCEEDED"
    assert bench.dispatcher.next_wakeup() is None


def test_what_is_merely_late_is_retried_within_a_budget_only() -> None:
    """Otherwise a cluster that is slow as a whole makes itself two thirds of its work."""
    config = PooledConfig(overdue_grace_ns=MS, late_retries=1, late_retry_share=0.5)
    bench = Bench(config, served(pipeline(1, stage(0, "a", 10))))
    only(bench.ask(0, slo=1000))
    _, (_, again) = bench.wake()
    assert isinstance(again, DispatchBatch)
    assert bench.wake()[1] == []  # the budget is used up: it waits, and is not given up
    assert bench.dispatcher.statistics()["withheld_retries"] == 1
    assert bench.tell(400, StageReported(again.batch, 0, 390 * MS, 400 * MS)) == []
    assert bench.tell(400, RequestCompleted(request(1))) == []
    assert bench.dispatcher.statistics()["completed_requests"] == 1
    for number in (2, 3):  # two halves make a whole
        late = only(bench.ask(500 * number, slo=400))
        _, commands = bench.wake()
        assert [c for c in commands if isinstance(c, DispatchBatch)] == [] or number == 3
        bench.tell(500 * number + 100, StageReported(late.batch, 0, 0, 500 * number * MS))
        bench.tell(500 * number + 100, RequestCompleted(request(number)))


def test_a_result_of_the_last_attempt_counts_however_late_it_is() -> None:
    bench, batch = overdue_twice()
    assert bench.tell(900, StageReported(batch.batch, 0, 890 * MS, 900 * MS)) == []
    assert bench.tell(900, RequestCompleted(request(1))) == []
    assert bench.dispatcher.statistics()["completed_requests"] == 1
    assert bench.dispatcher.next_wakeup() is None


def test_the_last_attempt_that_is_lost_with_a_silent_agent_is_made_again() -> None:
    """It was late twice because the agent was lost already, and nobody knew."""
    bench, _ = overdue_twice()
    assert bench.tell(500, AgentLost(AgentId("a"))) == []
    back = Agent(AgentId("a"), "cpu", ServerId("a"), 1 << 30, 10**9)
    (again,) = bench.tell(600, AgentJoined(back))
    assert isinstance(again, DispatchBatch)


def test_a_batch_that_is_really_lost_too_often_is_an_error() -> None:
    bench = Bench(PooledConfig(), served(pipeline(1, stage(0, "a", 10))))
    batch = only(bench.ask(0, slo=1000))
    for _ in range(2):
        failed = BatchFailed(batch.batch, AgentId("a"), "PARTITION_LOST", "gone", retryable=True)
        _, again = bench.tell(1, failed)
        batch = only([again])
    failed = BatchFailed(batch.batch, AgentId("a"), "PARTITION_LOST", "gone", retryable=True)
    _, reject = bench.tell(1, failed)
    assert isinstance(reject, Reject)
    assert reject.reason == "PARTITION_LOST"


def test_results_lost_on_their_way_are_computed_again() -> None:
    bench = Bench(None, served(pipeline(1, stage(0, "a", 10))))
    batch = only(bench.ask(0, slo=1000))
    bench.tell(10, StageReported(batch.batch, 0, 0, 10 * MS))
    moment, commands = bench.wake()
    assert moment == 10 + 250
    assert rows_of(only(commands)) == [(1, 0, 1, 0)]


def test_a_failure_that_no_retry_helps_is_passed_on() -> None:
    bench = Bench(None, ONE_STAGE)
    batch = only(bench.ask(0, rows=4))
    failed = BatchFailed(batch.batch, AgentId("a"), "INVALID_INPUT", "bad shape", retryable=False)
    off, answer = bench.tell(3, failed)
    reject = refused([answer])
    assert off == CancelBatch(batch.batch, (AgentId("a"),))
    assert (reject.reason, reject.message) == ("INVALID_INPUT", "bad shape")
    assert bench.dispatcher.snapshot() == []


def test_a_retryable_failure_is_repeated_at_once() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    batch = only(bench.ask(0, rows=4))
    failed = BatchFailed(batch.batch, AgentId("a"), "STALE_EPOCH", "old", retryable=True)
    off, again = bench.tell(3, failed)
    assert off == CancelBatch(batch.batch, (AgentId("a"),))
    assert rows_of(only([again])) == rows_of(batch)


def test_a_batch_that_one_gateway_cannot_send_is_off_at_the_agent_with_the_rows_of_others() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    elsewhere = RequestId(GatewayId("another"), 1)
    bench.ask(0, rows=2)
    batch = only(bench.tell(0, RequestArrived(elsewhere, CATS, 2, 1000 * MS)))
    assert {piece.request for piece in batch.slices} == {request(1), elsewhere}
    bench.tell(1, RequestCancelled(elsewhere))
    failed = BatchFailed(batch.batch, AgentId("a"), "CANCELLED", "gone", retryable=True)
    off, again = bench.tell(1, failed)
    assert off == CancelBatch(batch.batch, (AgentId("a"),))
    for _ in range(5):  # for how many others go, nothing of this one was lost
        batch = only([again])
        assert rows_of(batch) == [(1, 0, 2, 0)]
        failed = BatchFailed(batch.batch, AgentId("a"), "CANCELLED", "gone", retryable=True)
        _, again = bench.tell(1, failed)


def test_a_cancelled_batch_of_an_earlier_scheduler_is_off_wherever_it_may_be() -> None:
    bench = Bench(None, served(pipeline(1, stage(0, "ab", 10))))
    adopted = AdoptedRows(BatchId(77), 0, 1, 20 * MS)
    bench.tell(0, RequestArrived(request(1), CATS, 1, 1000 * MS, 0, (adopted,)))
    (off,) = bench.tell(1, RequestCancelled(request(1)))
    assert off == CancelBatch(BatchId(77), (AgentId("a"), AgentId("b")))


def test_a_cancelled_request_frees_its_bookings() -> None:
    bench = Bench(None, ONE_STAGE)
    batch = only(bench.ask(0, rows=4))
    assert bench.tell(1, RequestCancelled(request(1))) == [
        CancelBatch(batch.batch, (AgentId("a"),))
    ]
    assert bench.dispatcher.snapshot() == []


def test_completion_ends_a_request_without_cancelling_anything() -> None:
    bench = Bench(None, ONE_STAGE)
    only(bench.ask(0, rows=4))
    assert bench.tell(15, RequestCompleted(request(1))) == []
    assert bench.dispatcher.snapshot() == []
    assert bench.dispatcher.next_wakeup() is None


def test_a_report_moves_what_is_booked_behind_it() -> None:
    bench = Bench(None, served(pipeline(1, stage(0, "a", 10))))
    first, second = only(bench.ask(0)), only(bench.ask(0))
    bench.tell(13, StageReported(first.batch, 0, 0, 13 * MS))
    booked = [(r.batch, r.start_ns, r.end_ns) for r in bench.dispatcher.snapshot()]
    assert booked == [(second.batch, 13 * MS, 23 * MS)]
    figures = bench.dispatcher.statistics()
    assert figures["drift_ns_max"] == 3 * MS
    assert figures["displaced_batches"] == 1


def test_requests_wait_for_an_agent_as_long_as_that_can_help() -> None:
    bench = Bench(None, ONE_STAGE, agents="")
    assert bench.ask(0, rows=4, slo=50) == []
    (batch,) = bench.tell(20, AgentJoined(Agent(AgentId("a"), "x", ServerId("a"), 1, 1)))
    assert isinstance(batch, DispatchBatch)
    bench.tell(21, AgentLost(AgentId("a")))
    moment, commands = bench.wake()
    reject = refused(commands)
    assert moment == 49
    assert reject.reason == "UNAVAILABLE"
    assert reject.retry_after_ns


def test_before_the_first_plan_requests_wait_and_after_it_unknown_models_are_refused() -> None:
    bench = Bench(None, agents="a")
    assert bench.ask(0, rows=4) == []
    commands = bench.tell(5, PlanActivated(Plan(PlanId("p"), (ONE_STAGE,))))
    assert only(commands).rows == 4
    assert refused(bench.ask(6, which=DOGS)).reason == "NO_ACTIVE_PLAN"


def test_a_new_plan_lets_batches_finish_and_routes_what_waits() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    only(bench.ask(0, rows=4))
    assert bench.ask(0, rows=2) == []
    plan = Plan(PlanId("q"), (served(pipeline(2, stage(0, "b", 5, 6))),))
    moved = only(bench.tell(1, PlanActivated(plan)))
    assert moved.path[0].agent == "b"
    assert bench.dispatcher.statistics()["batches_in_flight"] == 2


def test_a_model_that_is_planned_no_more_is_refused() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    assert bench.ask(0, rows=2) == []
    reject = refused(bench.tell(1, PlanActivated(Plan(PlanId("q"), ()))))
    assert reject.reason == "NO_ACTIVE_PLAN"


def test_rows_of_an_earlier_scheduler_are_not_sent_twice_unless_overdue() -> None:
    bench = Bench(None, ONE_STAGE)
    old = AdoptedRows(BatchId(77), 0, 4, 20 * MS)
    event = RequestArrived(request(1), CATS, 8, 1000 * MS, 0, (old,))
    assert rows_of(only(bench.tell(0, event))) == [(1, 4, 4, 0)]
    bench.tell(16, StageReported(BatchId(1), 0, 0, 16 * MS))
    moment, commands = bench.wake()
    assert moment == 20 + 100
    off, again = commands
    assert off == CancelBatch(BatchId(77), (AgentId("a"), AgentId("b")))  # nobody knows whose it is
    assert rows_of(only([again])) == [(1, 0, 4, 0)]


def test_what_an_earlier_scheduler_booked_on_a_lost_agent_is_dispatched_again() -> None:
    before = Bench(None, TWO_STAGES, agents="abcd")
    batch = only(before.ask(0, rows=2))
    after = Bench(None, TWO_STAGES, agents="abcd")
    after.dispatcher._next_batch = 1 << 40
    after.dispatcher.restore(before.dispatcher.snapshot())
    old = AdoptedRows(batch.batch, 0, 2, batch.expected_finish_ns)
    assert after.tell(5, RequestArrived(request(1), CATS, 2, 100 * MS, 0, (old,))) == []
    assert after.tell(6, StageReported(batch.batch, 0, 0, 6 * MS)) == []
    again = only(after.tell(7, AgentLost(batch.path[1].agent)))
    assert rows_of(again) == rows_of(batch)
    assert {hop.agent for hop in again.path}.isdisjoint({batch.path[1].agent})


def test_nothing_outlives_its_deadline() -> None:
    bench = Bench(PooledConfig(overdue_grace_ns=10**12), ONE_STAGE)
    only(bench.ask(0, rows=4, slo=50))
    moment, commands = bench.wake()
    assert moment == 100
    reject, cancel = sorted(commands, key=lambda command: isinstance(command, CancelBatch))
    assert isinstance(reject, Reject)
    assert reject.reason == "DEADLINE_EXCEEDED"
    assert isinstance(cancel, CancelBatch)


def test_rows_must_be_positive() -> None:
    bench = Bench(None, ONE_STAGE)
    assert refused(bench.ask(0, rows=0)).reason == "INVALID_INPUT"


def test_a_gateway_that_never_heard_of_a_batch_gets_it_again() -> None:
    bench = Bench(PAPER, ONE_STAGE)
    only(bench.ask(0, rows=4))
    again = bench.tell(2, RequestArrived(request(1), CATS, 4, 100 * MS))
    assert [type(command) for command in again] == [CancelBatch, DispatchBatch]
    heard = RequestArrived(
        request(1), CATS, 4, 100 * MS, 0, (AdoptedRows(BatchId(2), 0, 4, 16 * MS),)
    )
    assert bench.tell(3, heard) == []
