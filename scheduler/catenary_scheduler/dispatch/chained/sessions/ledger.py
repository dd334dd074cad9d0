"""State of the requests of the chained dispatcher, and the operations on it.

Every rule here serves one promise: a request that was admitted is answered exactly once.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import Reject
from catenary_services.domain.ids import Nanoseconds
from catenary_services.errors import DeadlineExceeded, NoActivePlan, PartitionLost


class ChainLedger(SessionTable):
    """Requests that wait, have a session, or are answered."""

    def enqueue(self, sequence: SequenceRequest) -> None:
        """Adds a waiting request; after a failure it may first wait for the end of a suspicion."""
        model_queue = self.model_queue(sequence.model)
        if sequence.restarts and model_queue.must_rest:
            last = self.last_try(sequence)
            if self.now >= last:
                self.tries_no_more(sequence)
                return
            self.resting[sequence.request] = sequence
            self.timers.set(sequence, last, len(self.sequences))
            return
        model_queue.waiting.push(sequence)
        self.dirty[sequence.model] = None

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
        if self.sequences.get(sequence.request) is sequence:
            self.counters["rejected_requests"] += 1
            self.commands.append(
                Reject(sequence.request, reason, message, retry_after_ns, None, details or {})
            )
            self.forget(sequence)

    def last_try(self, sequence: SequenceRequest) -> Nanoseconds:
        """Returns until when a request that lost a session waits for chains that failed as well."""
        spare = min(self.config.last_try_ns, (sequence.deadline - sequence.arrived) // 4)
        return sequence.deadline - spare

    def tries_no_more(self, sequence: SequenceRequest) -> None:
        """Rejects a request that lost sessions while its client has time to ask again."""
        lost = f"the session was lost {sequence.restarts} times, and there is no other chain now"
        retry_after = self.config.retry_after_ns
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
            retry_after_ns=self.config.retry_after_ns,
        )

    def forget(self, sequence: SequenceRequest) -> None:
        """Stops following a request, and closes its session."""
        self.sequences.pop(sequence.request, None)
        sequence.timer = -1
        session = sequence.session
        if session is not None:
            self.close(session)
        elif self.resting.pop(sequence.request, None) is None:
            self.model_queue(sequence.model).waiting.remove(sequence)

    def again(self, sequence: SequenceRequest) -> None:
        """Puts a request back to the head of its queue; its session is closed."""
        if sequence.session is not None:
            self.close(sequence.session)
        sequence.again = True
        sequence.check_later = None
        if self.plan is not None and not self.model_queue(sequence.model).served:
            self.unserved(sequence)
        elif self.now >= sequence.deadline:
            self.too_late(sequence, "queue")
        else:
            self.timers.set(sequence, sequence.deadline, len(self.sequences))
            self.enqueue(sequence)

    def restart(self, sequence: SequenceRequest) -> None:
        """Starts a request again that lost its session, as often as is allowed."""
        sequence.restarts += 1
        if sequence.restarts > self.config.max_restarts:
            lost = f"the session was lost {sequence.restarts} times"
            self.reject(sequence, PartitionLost.reason, lost)
            return
        self.counters["restarted_sessions"] += 1
        self.again(sequence)
