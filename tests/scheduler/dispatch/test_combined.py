"""Pipelines and chains under one dispatcher and one book."""

from __future__ import annotations

from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import (
    ChainedConfig,
    ChainedDispatcher,
    CombinedDispatcher,
    PooledConfig,
    PooledDispatcher,
)
from catenary_scheduler.dispatch.events import (
    AgentLost,
    CloseSessions,
    Command,
    DispatchBatch,
    Event,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    StageReported,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    PartitionKey,
)
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan
from scheduling_cases.pipelines import CATS, MS, joins, pipeline, plan, request, served, stage

LLAMA = ModelKey("llama", "1")
A = AgentId("a")
HOP = ChainHop(A, PartitionKey(LLAMA, 0, 4), 0, 4)
VISION = served(pipeline(1, stage(0, "a", 10)), slo_ms=1000)
LANGUAGE = ModelPlan(LLAMA, 10**9, (), chains=(Chain("k", (HOP,), 1, 50 * MS),))


class Both:
    def __init__(self) -> None:
        book = Book()
        ticks = iter(range(10**6))
        self.at = CombinedDispatcher(
            PooledDispatcher(PooledConfig(), book=book, stopwatch=ticks.__next__),
            ChainedDispatcher(ChainedConfig(checked=True), book, stopwatch=ticks.__next__),
            book,
        )

    def tell(self, at_ms: float, event: Event) -> list[Command]:
        return self.at.handle(event, round(at_ms * MS))


def busy() -> tuple[Both, DispatchBatch, StartSession]:
    both = Both()
    both.tell(0, joins("a"))
    both.tell(0, PlanActivated(plan(VISION, LANGUAGE)))
    (batch,) = both.tell(0, RequestArrived(request(1), CATS, 1, 900 * MS))
    (session,) = both.tell(0, SessionRequested(request(2), LLAMA, 3, 9, 800 * MS))
    assert isinstance(batch, DispatchBatch)
    assert isinstance(session, StartSession)
    return both, batch, session


def test_each_model_is_served_by_its_kind_of_plan_from_one_book() -> None:
    both, batch, session = busy()
    records = both.at.snapshot()
    assert [(r.batch, r.session, r.resource) for r in records] == [
        (batch.batch, 0, "gpu/a"),
        (0, session.session, "cache/a/llama:1[0,4)"),
    ]
    assert batch.batch == session.session  # the same number, and no harm done


def test_each_change_is_reported_once() -> None:
    both, batch, session = busy()
    assert sorted(c.reservation.resource for c in both.at.take_changes()) == [
        "cache/a/llama:1[0,4)",
        "gpu/a",
    ]
    assert both.at.take_changes() == []
    both.tell(10, StageReported(batch.batch, 0, 0, 10 * MS))
    both.tell(11, RequestCompleted(request(1)))
    both.tell(12, SessionsClosed(A, (session.session,)))
    both.tell(12, RequestCompleted(request(2)))
    assert sorted(c.op for c in both.at.take_changes()) == ["delete", "delete"]
    assert both.at.snapshot() == []
    assert both.at.next_wakeup() is None


def test_the_end_of_a_request_reaches_whoever_has_it() -> None:
    both, _, session = busy()
    (close,) = both.tell(1, RequestCancelled(request(2)))
    assert close == CloseSessions(A, (session.session,))
    both.tell(1, RequestCancelled(request(1)))
    assert both.at.statistics()["open_requests"] == 0
    assert both.at.statistics()["cancelled_requests"] == 2


def test_it_wakes_for_the_first_of_both() -> None:
    both, _, _ = busy()
    pooled, chained = both.at.pooled.next_wakeup(), both.at.chained.next_wakeup()
    assert pooled is not None
    assert chained is not None
    assert both.at.next_wakeup() == min(pooled, chained)
    reasons = [c.reason for c in both.tell(2000, Tick()) if isinstance(c, Reject)]
    assert reasons == ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]


def test_a_lost_agent_is_lost_to_both() -> None:
    both, batch, session = busy()
    both.tell(1, SessionFailed(session.session, None, "INTERNAL", "no", True))
    commands = both.tell(1, AgentLost(A))
    assert not [c for c in commands if isinstance(c, DispatchBatch | StartSession)]
    assert both.at.snapshot() == []
    both.tell(2, SessionsHeld(A, ()))
    commands = both.tell(300, joins("a"))
    assert sorted(type(c).__name__ for c in commands) == ["DispatchBatch", "StartSession"]
    assert batch.batch not in [r.batch for r in both.at.snapshot()]


def test_a_successor_takes_over_both_kinds_of_bookings() -> None:
    both, _, _ = busy()
    other = Both()
    other.at.restore(both.at.snapshot())
    assert set(other.at.snapshot()) == set(both.at.snapshot())
    assert other.at.statistics()["sessions_in_flight"] == 1


def test_decision_times_of_both_are_taken_together() -> None:
    both, _, _ = busy()
    assert len(both.at.take_decision_times()) == 2
    assert both.at.take_decision_times() == []
    assert both.at.statistics()["decisions"] == 2
