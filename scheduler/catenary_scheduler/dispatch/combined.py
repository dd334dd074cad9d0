"""One dispatcher for all kinds of plans: pooled pipelines and server chains over one book."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.book import Book, Reservation, ReservationChange
from catenary_scheduler.dispatch.chained.dispatcher import ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    BatchFailed,
    CachesReported,
    Command,
    Event,
    LatencyRefitted,
    MoveCostsMeasured,
    MoveRequested,
    PlanActivated,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionRequested,
    SessionsClosed,
    SessionsFound,
    SessionsHeld,
    SessionsProgressed,
    StageReported,
    StageStarted,
    Tick,
    WindowReported,
    earlier,
)
from catenary_scheduler.dispatch.pooled.dispatcher import PooledDispatcher
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.plan import ModelPlan, Plan


class CombinedDispatcher:
    """Implements `Dispatcher` by handing every event to the dispatcher it concerns.

    Both must have been made with `book`. This class reports for the book, so that every change in
    it is reported once, whichever of them made it.

    Args:
        pooled: Serves the models with pipelines.
        chained: Serves the models with chains.
        book: The book that both share.
    """

    def __init__(self, pooled: PooledDispatcher, chained: ChainedDispatcher, book: Book) -> None:
        self.pooled = pooled
        self.chained = chained
        self._book = book

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Folds one event into the state and returns the commands that follow, in order."""
        match event:
            case (
                RequestArrived()
                | StageReported()
                | StageStarted()
                | WindowReported()
                | BatchFailed()
            ):
                return self.pooled.handle(event, now)
            case (
                SessionRequested()
                | SessionsClosed()
                | SessionsHeld()
                | SessionsFound()
                | SessionFailed()
                | SessionsProgressed()
                | LatencyRefitted()
                | MoveRequested()
                | SessionMoved()
                | MoveCostsMeasured()
                | CachesReported()
            ):
                return self._chained(event, now)
            case RequestCancelled() | RequestCompleted():
                if self.chained.has(event.request):
                    return self._chained(event, now)
                return self.pooled.handle(event, now)
            case PlanActivated():
                chains, pipelines = _split(event.plan)
                return self.pooled.handle(PlanActivated(pipelines), now) + self.chained.handle(
                    PlanActivated(chains), now
                )
            case AgentJoined() | AgentLost() | Tick():
                return self.pooled.handle(event, now) + self._chained(event, now)

    def _chained(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Hands an event to the chains; batches that wait are looked at again if sessions began.

        Their last safe moment may be earlier now, where steps take time of the same devices.
        """
        slots = self._book.slots
        before = slots.prompts
        commands = self.chained.handle(event, now)
        if slots.prompts != before:
            self.pooled.look_again()
            commands += self.pooled.handle(Tick(), now)
        return commands

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns when to send a `Tick` at the latest; None if nothing waits for time to pass."""
        return earlier(self.pooled.next_wakeup(), self.chained.next_wakeup())

    def take_changes(self) -> list[ReservationChange]:
        """Returns the changes of the book since the last call."""
        return self._book.take_changes()

    def snapshot(self) -> list[Reservation]:
        return self._book.snapshot()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters the bookings of an earlier scheduler, with times on this clock."""
        self._book.restore(reservations)
        self.chained.restored()

    def statistics(self) -> dict[str, int]:
        """Returns the figures of both dispatchers; figures of the same name are added up."""
        figures = self.pooled.statistics()
        for name, value in self.chained.statistics().items():
            figures[name] = figures.get(name, 0) + value
        return figures

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns the nanoseconds that each decision since the last call took.

        It is empty without stopwatches.
        """
        return self.pooled.take_decision_times() + self.chained.take_decision_times()


def _split(plan: Plan) -> tuple[Plan, Plan]:
    """Splits a plan into the models that have chains, and the others."""
    chains: list[ModelPlan] = []
    pipelines: list[ModelPlan] = []
    for model in plan.models:
        (chains if model.chains or model.caches else pipelines).append(model)
    return Plan(plan.plan_id, tuple(chains)), Plan(plan.plan_id, tuple(pipelines))
