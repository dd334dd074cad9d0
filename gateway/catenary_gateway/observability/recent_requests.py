"""The latest requests and where their time went, for `Admin.GetTrace`."""

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
    """What is kept of a request: times and facts, no tensors."""

    id: str
    model: str
    outcome: str
    """"OK" or the reason it failed."""
    arrival: RequestArrival
    submitted_ns: int
    finished_ns: int
    attempts: tuple[BatchAttempt, ...]
    session: SessionRecord | None = None
    """Of a generation, which has no attempts."""
    rows: int = 1

    @classmethod
    def of(cls, pending: PendingRequest, outcome: str, finished_ns: int) -> FinishedRequest:
        """Returns what is kept of `pending`."""
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
    """A bounded memory of finished requests, by the id the client gave or was given."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_id: OrderedDict[str, FinishedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: FinishedRequest) -> None:
        """Remembers a request; of two with one id the later one."""
        self._by_id[request.id] = request
        self._by_id.move_to_end(request.id)
        if len(self._by_id) > self._capacity:
            self._by_id.popitem(last=False)

    def find(self, request_id: str) -> FinishedRequest | None:
        """Returns the request with this id; the latest one for an empty id."""
        if not request_id:
            return next(reversed(self._by_id.values()), None)
        found = self._by_id.get(request_id)
        if found is None:
            # What OpenAI's clients are told is the id behind a prefix.
            found = self._by_id.get(request_id.partition("-")[2])
        return found

    def latest(self, most: int) -> list[FinishedRequest]:
        """Returns the requests that ended last, the latest first."""
        return list(itertools.islice(reversed(self._by_id.values()), most))
