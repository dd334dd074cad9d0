"""The repair of a leak: an event for the dispatcher, or an order to agents, and nothing else."""

from __future__ import annotations

from catenary_scheduler.dispatch.auditing.leaks import Leak
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    BatchFailed,
    CancelBatch,
    RequestCancelled,
    SessionFailed,
    SessionMoved,
    SessionsClosed,
    SessionsFound,
)
from catenary_services.domain.ids import RequestId
from catenary_services.errors import PartitionLost

Remedy = (
    SessionsClosed
    | SessionFailed
    | SessionMoved
    | SessionsFound
    | BatchFailed
    | RequestCancelled
    | CancelBatch
)
_WHY = "an audit found that nobody holds it"


def remedy_of(leak: Leak) -> Remedy | None:
    """Returns the event or order that repairs a leak; None if it is not about the book.

    Leaks that are not about the book are repaired by the caller: a batch that only counts as in
    flight, a request that only counts as open, a partition that only counts as loaded.
    """
    remedy: Remedy | None = None
    match leak:
        case Leak(kind="slots_unheld", agent=str() as agent, session=int() as session):
            remedy = SessionsClosed(agent, (session,))
        case Leak(kind="session_lost" | "start_lost" | "move_lost", session=int() as session):
            remedy = SessionFailed(session, leak.agent, PartitionLost.reason, _WHY, True)
        case Leak(kind="move_unheard", session=int() as session, source=int() as source):
            remedy = SessionMoved(session, source)
        case Leak(
            kind="session_orphan" | "slots_differ", agent=str() as agent, session=int() as session
        ):
            remedy = SessionsFound(agent, (AdoptedSession(session, leak.hops),))
        case Leak(kind="batch_orphan", agent=str() as agent, batch=int() as batch):
            remedy = CancelBatch(batch, (agent,))
        case Leak(kind="batch_unheld", batch=int() as batch):
            remedy = BatchFailed(batch, None, PartitionLost.reason, _WHY, True)
        case Leak(kind="request_unwanted" | "gateway_gone", request=RequestId() as request):
            remedy = RequestCancelled(request)
    return remedy
