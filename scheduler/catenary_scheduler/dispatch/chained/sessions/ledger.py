"""Requests that wait, have a session, or are answered.

Every rule here serves one promise: a request that was admitted is answered exactly once.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    GIVEN_UP,
    LOST,
    REJECTED,
    REQUEST_ENDED,
    SUSPENDED,
    RequestState,
    Transition,
)
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import Reject
from catenary_services.domain.ids import Nanoseconds
from catenary_services.errors import DeadlineExceeded, NoActivePlan, PartitionLost, Unavailable


class RequestLedger:
    """Has requests wait, begin again, and end.

    Args:
        table: The state.
        closing: Ends sessions.
    """

    def __init__(self, table: SessionTable, closing: SessionClosing) -> None:
        self._table = table
        self._closing = closing

    def enqueue(self, sequence: SequenceRequest) -> None:
        """Adds a waiting request; after a failure it may first wait for the end of a suspicion."""
        table = self._table
        model_queue = table.model_queue(sequence.model)
        if sequence.restarts and model_queue.must_rest:
            last = self._last_try(sequence)
            if table.now >= last:
                self.tries_no_more(sequence)
                return
            table.request_goes(sequence, SUSPENDED)
            table.resting[sequence.request] = sequence
            table.timers.set(sequence, last, len(table.sequences))
            return
        sequence.prefixes = model_queue.prefixes
        model_queue.waiting.push(sequence)
        table.dirty[sequence.model] = None

    def again(
        self, sequence: SequenceRequest, way: Transition[RequestState], why: str = ""
    ) -> None:
        """Puts a request back to the head of its queue; its session is closed.

        Args:
            sequence: The request.
            way: The transition that has it wait.
            why: Particulars for its story.
        """
        self._table.request_goes(sequence, way, why)
        if sequence.session is not None:
            self._closing.close(sequence.session, GIVEN_UP)
        self.wait_again(sequence)

    def wait_again(self, sequence: SequenceRequest) -> None:
        """Puts a request that has lost its place to the head of its queue, or answers it."""
        table = self._table
        sequence.again = True
        sequence.check_later = None
        if table.plan is not None and not table.model_queue(sequence.model).served:
            self.unserved(sequence)
        elif table.now >= sequence.deadline:
            self.too_late(sequence, "queue")
        else:
            table.timers.set(sequence, sequence.deadline, len(table.sequences))
            self.enqueue(sequence)

    def restart(self, sequence: SequenceRequest, why: str) -> None:
        """Starts a request again that lost its session, as often as is allowed."""
        sequence.restarts += 1
        if sequence.restarts > self._table.config.max_restarts:
            lost = f"the session was lost {sequence.restarts} times"
            self.reject(sequence, PartitionLost.reason, lost)
            return
        self._table.counters["restarted_sessions"] += 1
        self.again(sequence, LOST, why)

    # Answers

    def forget(
        self, sequence: SequenceRequest, way: Transition[RequestState], why: str = ""
    ) -> None:
        """Stops following a request, and closes its session.

        Args:
            sequence: The request.
            way: The transition that ends it.
            why: Particulars for its story.
        """
        table, state = self._table, sequence.state
        table.request_goes(sequence, way, why)
        table.history.request_ended(sequence)
        table.sequences.pop(sequence.request, None)
        sequence.timer = -1
        session = sequence.session
        if session is not None:
            self._closing.close(session, REQUEST_ENDED)
        elif state is RequestState.RESTING:
            del table.resting[sequence.request]
        else:
            table.model_queue(sequence.model).waiting.remove(sequence)

    def reject(
        self,
        sequence: SequenceRequest,
        reason: str,
        message: str,
        *,
        retry_after_ns: Nanoseconds | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        """Answers a request with an error, unless it was answered already."""
        table = self._table
        if table.sequences.get(sequence.request) is sequence:
            table.counters["rejected_requests"] += 1
            table.commands.append(
                Reject(
                    sequence.request,
                    reason,
                    message,
                    retry_after_ns,
                    details=details or {},
                    cause=table.event,
                )
            )
            self.forget(sequence, REJECTED, reason)

    def tries_no_more(self, sequence: SequenceRequest) -> None:
        """Rejects a request that lost sessions while its client has time to ask again."""
        lost = f"the session was lost {sequence.restarts} times, and there is no other chain now"
        retry_after = self._table.config.retry_after_ns
        self.reject(sequence, PartitionLost.reason, lost, retry_after_ns=retry_after)

    def too_late(self, sequence: SequenceRequest, stage: str) -> None:
        """Rejects a request whose deadline is over."""
        message = "no answer before the deadline"
        self.reject(sequence, DeadlineExceeded.reason, message, details={"stage": stage})

    def unserved(self, sequence: SequenceRequest) -> None:
        """Rejects a request whose model no plan serves any more."""
        self.reject(
            sequence,
            NoActivePlan.reason,
            f"no plan serves {sequence.model} any more",
            retry_after_ns=self._table.config.retry_after_ns,
        )

    def unstarted(self, sequence: SequenceRequest) -> None:
        """Rejects a request whose deadline is over while it still waits."""
        table = self._table
        model_queue = table.model_queue(sequence.model)
        retry_after = table.config.retry_after_ns
        if table.plan is None:
            self.reject(
                sequence, NoActivePlan.reason, "no plan is active", retry_after_ns=retry_after
            )
        elif not model_queue.usable:
            message = "no chain has all its agents now"
            self.reject(sequence, Unavailable.reason, message, retry_after_ns=retry_after)
        else:
            self.too_late(sequence, "queue")

    def _last_try(self, sequence: SequenceRequest) -> Nanoseconds:
        """Returns until when a request that lost a session waits for chains that failed as well."""
        spare = min(self._table.config.last_try_ns, (sequence.deadline - sequence.arrived) // 4)
        return sequence.deadline - spare
