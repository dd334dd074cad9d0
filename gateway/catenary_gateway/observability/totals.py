"""Sums over the requests to one model since the gateway started: where their time went.

What an inference waited for is told by the batch that brought its last rows; the parts add up to
the time from the request's submission to its answer. Generations have a time, and no parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from catenary_gateway.observability.outcome_kinds import OK
from catenary_gateway.observability.outcomes import FinishedRequest
from catenary_gateway.results.pending import BatchAttempt

MOST_BATCH_SIZES = 256
"""Most sizes of batches that are told apart; batches of further sizes count in the other sums."""


@dataclass(slots=True)
class DurationSum:
    """Number and sum of durations."""

    count: int = 0
    total_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Adds one duration; a negative one, of clocks that differ, counts as 0."""
        self.count += 1
        self.total_ns += max(0, duration_ns)


@dataclass(slots=True)
class BatchTotals:
    """Sums over batches: those of one size, or those that brought the requests' last rows."""

    input: DurationSum = field(default_factory=DurationSum)
    compute: DurationSum = field(default_factory=DurationSum)
    output: DurationSum = field(default_factory=DurationSum)

    def add(self, attempt: BatchAttempt) -> int:
        """Adds a batch whose result has come.

        Returns:
            The nanoseconds that its rows waited for devices, which are in none of the sums.
        """
        wait_ns = sum(hop.wait_ns for hop in attempt.timings)
        compute_ns = sum(hop.compute_ns for hop in attempt.timings)
        sent_ns = max(attempt.sent_ns, attempt.dispatched_ns)
        input_ns = sent_ns - attempt.dispatched_ns
        input_ns += sum(hop.transfer_ns for hop in attempt.timings)
        whole_ns = max(attempt.merged_ns, attempt.result_ns) - attempt.dispatched_ns
        self.input.add(input_ns)
        self.compute.add(compute_ns)
        self.output.add(whole_ns - input_ns - wait_ns - compute_ns)
        return wait_ns


class ModelTotals:
    """Sums over the finished requests to one version of a model."""

    def __init__(self) -> None:
        self.answered_ns = 0
        """Nanoseconds from arrival to answer, of all requests with an answer."""
        self.failed_ns = 0
        """The same of all others that were submitted."""
        self.rows = 0
        """Rows of the requests that were answered."""
        self.batches = 0
        """Batches that came back with rows of this gateway."""
        self.latest_unix_ns = 0
        """The time at which the last request was answered; 0 if none was."""
        self.queue = DurationSum()
        self.requests = BatchTotals()
        self.of_batch_size: dict[int, BatchTotals] = {}

    def add(self, request: FinishedRequest) -> None:
        """Adds a finished request."""
        arrival = request.arrival
        duration_ns = request.finished_ns - arrival.monotonic_ns
        self._add_batches(request)
        if request.outcome != OK:
            self.failed_ns += duration_ns
            return
        self.answered_ns += duration_ns
        self.rows += request.rows
        self.latest_unix_ns = arrival.unix_ns + duration_ns
        brought = [attempt for attempt in request.attempts if attempt.result_ns]
        if brought:
            last = max(brought, key=lambda attempt: attempt.merged_ns)
            wait_ns = self.requests.add(last)
            self.queue.add(last.dispatched_ns - request.submitted_ns + wait_ns)

    def _add_batches(self, request: FinishedRequest) -> None:
        for attempt in request.attempts:
            # A batch may have rows of several requests.
            if attempt.is_counted or not attempt.result_ns:
                continue
            attempt.is_counted = True
            self.batches += 1
            size = attempt.batch_rows
            if size in self.of_batch_size or len(self.of_batch_size) < MOST_BATCH_SIZES:
                self.of_batch_size.setdefault(size, BatchTotals()).add(attempt)
