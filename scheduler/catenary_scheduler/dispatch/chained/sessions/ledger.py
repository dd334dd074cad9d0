"""What the chained dispatcher knows, and the few things that may be done to it.

Every rule here serves one promise: a request that was admitted is answered exactly once.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.sessions.holding import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import Reject
from catenary_services.domain.ids import Nanoseconds
from catenary_services.errors import DeadlineExceeded, NoActivePlan, PartitionLost


class ChainLedger(SessionTable):
    """Requests: they wait, have a session, or are answered."""

    def enqueue(self, ticket: SequenceRequest) -> None:
        """Has a request wait for a chain; after a failure, if need be, for the end of a doubt."""
        desk = self.desk(ticket.model)
        if ticket.restarts and desk.must_rest:
            last = self.last_try(ticket)
            if self.now >= last:
                self.tries_no_more(ticket)
                return
            self.resting[ticket.request] = ticket
            self.timers.set(ticket, last, len(self.tickets))
            return
        desk.line.push(ticket)
        self.dirty[ticket.model] = None

    def reject(
        self,
        ticket: SequenceRequest,
        reason: str,
        message: str,
        *,
        retry_after_ns: Nanoseconds | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        """Answers a request with an error, unless it was answered already."""
        if self.tickets.get(ticket.request) is ticket:
            self.counters["rejected_requests"] += 1
            self.commands.append(
                Reject(ticket.request, reason, message, retry_after_ns, None, details or {})
            )
            self.forget(ticket)

    def last_try(self, ticket: SequenceRequest) -> Nanoseconds:
        """Returns until when a request that lost a session waits for chains that failed, too."""
        spare = min(self.config.last_try_ns, (ticket.deadline - ticket.arrived) // 4)
        return ticket.deadline - spare

    def tries_no_more(self, ticket: SequenceRequest) -> None:
        """Answers a request that lost sessions while there is time to ask again."""
        lost = f"the session was lost {ticket.restarts} times, and there is no other chain now"
        retry_after = self.config.retry_after_ns
        self.reject(ticket, PartitionLost.reason, lost, retry_after_ns=retry_after)

    def too_late(self, ticket: SequenceRequest, stage: str) -> None:
        """Answers a request whose deadline is over."""
        message = "no answer before the deadline"
        self.reject(ticket, DeadlineExceeded.reason, message, details={"stage": stage})

    def unserved(self, ticket: SequenceRequest) -> None:
        """Answers a request whose model no plan serves any more."""
        self.reject(
            ticket,
            NoActivePlan.reason,
            f"no plan serves {ticket.model} any more",
            retry_after_ns=self.config.retry_after_ns,
        )

    def forget(self, ticket: SequenceRequest) -> None:
        """Stops following a request, and closes its session."""
        self.tickets.pop(ticket.request, None)
        ticket.timer = -1
        session = ticket.session
        if session is not None:
            self.close(session)
        elif self.resting.pop(ticket.request, None) is None:
            self.desk(ticket.model).line.remove(ticket)

    def again(self, ticket: SequenceRequest) -> None:
        """Puts a request back to the head of its queue; what it had is closed."""
        if ticket.session is not None:
            self.close(ticket.session)
        ticket.again = True
        ticket.doubt = None
        if self.plan is not None and not self.desk(ticket.model).served:
            self.unserved(ticket)
        elif self.now >= ticket.deadline:
            self.too_late(ticket, "queue")
        else:
            self.timers.set(ticket, ticket.deadline, len(self.tickets))
            self.enqueue(ticket)

    def restart(self, ticket: SequenceRequest) -> None:
        """Starts a request again that lost its session, as often as is allowed."""
        ticket.restarts += 1
        if ticket.restarts > self.config.max_restarts:
            lost = f"the session was lost {ticket.restarts} times"
            self.reject(ticket, PartitionLost.reason, lost)
            return
        self.counters["restarted_sessions"] += 1
        self.again(ticket)
