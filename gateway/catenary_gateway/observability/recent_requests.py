"""The latest finished requests, from which `Admin.GetTrace` draws waterfalls."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from catenary_gateway.inference import RequestArrival
from catenary_gateway.observability.generations import SessionRecord
from catenary_gateway.results.pending import BatchAttempt, PendingRequest

CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The record that is kept of a finished request: times and facts, no tensors."""

    id: str
    model: str
    outcome: str
    """"OK", or the reason of the error."""
    arrival: RequestArrival
    submitted_ns: int
    finished_ns: int
    attempts: tuple[BatchAttempt, ...]
    session: SessionRecord | None = None
    """The record of a generation, which has no attempts; None for an inference."""
    rows: int = 1
    number: int = 0
    """The number of a generation among the requests of this gateway; 0 for an inference."""

    @classmethod
    def of(cls, pending: PendingRequest, outcome: str, finished_ns: int) -> FinishedRequest:
        """Returns the record of an inference that has ended."""
        return cls(
            pending.request.id,
            pending.request.model.label,
            outcome,
            pending.arrival,
            pending.submitted_ns,
            finished_ns,
            tuple(pending.attempts),
            rows=pending.request.rows,
        )


class RecentRequests:
    """The latest finished requests by id, of bounded number."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_id: OrderedDict[str, FinishedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: FinishedRequest) -> None:
        """Adds a request; of two requests with one id only the later is kept."""
        self._by_id[request.id] = request
        self._by_id.move_to_end(request.id)
        if len(self._by_id) > self._capacity:
            self._by_id.popitem(last=False)

    def find(self, request_id: str) -> FinishedRequest | None:
        """Returns the request with this id, the latest one for ""; None if it is unknown."""
        if not request_id:
            return next(reversed(self._by_id.values()), None)
        found = self._by_id.get(request_id)
        if found is None:
            # OpenAI's clients see the id with a prefix such as "chatcmpl-".
            found = self._by_id.get(request_id.partition("-")[2])
        return found

    def latest(self, most: int) -> list[FinishedRequest]:
        """Returns the requests that ended last, the latest first."""
        return list(itertools.islice(reversed(self._by_id.values()), most))
