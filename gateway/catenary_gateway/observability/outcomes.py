"""The requests that ended lately: outcomes counted by model, and the latest requests themselves.

Outcomes are counted over the last minutes, in buckets of a few seconds. From the latest requests
`Admin.GetTrace` draws waterfalls.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from catenary_gateway.inference import RequestArrival
from catenary_gateway.observability.generations import SessionRecord
from catenary_gateway.observability.outcome_kinds import OutcomeKind
from catenary_gateway.results.pending import BatchAttempt, PendingRequest

BUCKET_S = 5
BUCKETS = 60
"""Number of buckets that are kept; together they span five minutes."""
_NANOSECONDS_PER_SECOND = 1_000_000_000

_SHORTEST_NS = 100_000
_BINS_PER_OCTAVE = 8
_BINS = 21 * _BINS_PER_OCTAVE
"""Number of latency bins, which span 0.1 ms to more than 200 s; neighbours differ by 9 %."""
CAPACITY = 1024
"""Number of finished requests that are kept."""


@dataclass(slots=True)
class OutcomeBucket:
    """Counts of the requests that ended within one interval of `BUCKET_S` seconds."""

    number: int
    """The interval's number: its start on the monotonic clock, in units of `BUCKET_S`."""
    kinds: Counter[OutcomeKind] = field(default_factory=Counter)
    """Number of requests by kind."""
    rows: int = 0
    """Number of rows of the requests that were answered without an error."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of late and refused requests that ended with an error, by its reason."""
    client_errors: Counter[str] = field(default_factory=Counter)
    """Number of requests that count for no share because of their client, by reason."""
    bins: Counter[int] = field(default_factory=Counter)
    """Number of requests answered without an error, by latency bin."""


@dataclass(frozen=True, slots=True)
class ModelOutcomes:
    """Outcomes of one model's requests over the last minutes.

    Attributes:
        seconds: Length of the period, in seconds.
        good: Number of requests that were answered in time.
        late: Number of requests that were accepted and not answered in time.
        refused: Number of requests that were turned away.
        client: Number of requests that failed because of their client.
        rows: Number of rows of the requests that were answered without an error.
        errors: Number of late and refused requests that ended with an error, by its reason.
        client_errors: Number of requests that failed because of their client, by reason.
        p50_ns: Median time from arrival to answer, within 5 % of the true value; 0 if none was
            answered.
        p99_ns: The same for the 99th percentile.
        history: One (age in seconds, good, late, refused) per bucket with any request, oldest
            first.
    """

    seconds: int
    good: int
    late: int
    refused: int
    client: int
    rows: int
    errors: dict[str, int]
    client_errors: dict[str, int]
    p50_ns: int
    p99_ns: int
    history: tuple[tuple[int, int, int, int], ...]

    @property
    def arrived(self) -> int:
        """Number of requests that the platform had to answer."""
        return self.good + self.late + self.refused

    @property
    def attainment_ratio(self) -> float:
        """Share of the requests that were good, of all that arrived; -1 if none did."""
        return self.good / self.arrived if self.arrived else -1.0


class RecentOutcomes:
    """Counters of outcomes by model, of bounded size however many requests there are.

    Requests that were turned away before their model was known are those of the model "".
    """

    def __init__(self) -> None:
        self._models: dict[str, deque[OutcomeBucket]] = {}

    def add(self, model: str, now_ns: int, kind: OutcomeKind, duration_ns: int, rows: int) -> None:
        """Counts a request that was answered without an error."""
        bucket = self._bucket(model, now_ns)
        bucket.kinds[kind] += 1
        bucket.rows += rows
        bucket.bins[bin_of(duration_ns)] += 1

    def add_error(self, model: str, now_ns: int, kind: OutcomeKind, reason: str) -> None:
        """Counts a request that ended with an error.

        Args:
            model: The model's label.
            now_ns: The present time on the monotonic clock.
            kind: The kind of the request.
            reason: The reason of the error.
        """
        bucket = self._bucket(model, now_ns)
        bucket.kinds[kind] += 1
        if kind is OutcomeKind.CLIENT:
            bucket.client_errors[reason] += 1
        else:
            bucket.errors[reason] += 1

    def of(self, model: str, now_ns: int) -> ModelOutcomes:
        """Returns the outcomes of one model over the last minutes."""
        buckets = list(self._fresh(model, now_ns))
        kinds: Counter[OutcomeKind] = Counter()
        errors: Counter[str] = Counter()
        client_errors: Counter[str] = Counter()
        bins: Counter[int] = Counter()
        for bucket in buckets:
            kinds.update(bucket.kinds)
            errors.update(bucket.errors)
            client_errors.update(bucket.client_errors)
            bins.update(bucket.bins)
        now = _number_of(now_ns)
        return ModelOutcomes(
            seconds=BUCKET_S * BUCKETS,
            good=kinds[OutcomeKind.GOOD],
            late=kinds[OutcomeKind.LATE],
            refused=kinds[OutcomeKind.REFUSED],
            client=kinds[OutcomeKind.CLIENT],
            rows=sum(bucket.rows for bucket in buckets),
            errors=dict(errors),
            client_errors=dict(client_errors),
            p50_ns=percentile_ns(bins, 0.50),
            p99_ns=percentile_ns(bins, 0.99),
            history=tuple(
                (
                    (now - bucket.number) * BUCKET_S,
                    bucket.kinds[OutcomeKind.GOOD],
                    bucket.kinds[OutcomeKind.LATE],
                    bucket.kinds[OutcomeKind.REFUSED],
                )
                for bucket in buckets
            ),
        )

    def models(self) -> tuple[str, ...]:
        """Returns the labels of all models with an outcome since the gateway started."""
        return tuple(self._models)

    def _bucket(self, model: str, now_ns: int) -> OutcomeBucket:
        buckets = self._models.get(model)
        if buckets is None:
            buckets = self._models[model] = deque(maxlen=BUCKETS)
        number = _number_of(now_ns)
        if not buckets or buckets[-1].number < number:
            buckets.append(OutcomeBucket(number))
        return buckets[-1]

    def _fresh(self, model: str, now_ns: int) -> Iterator[OutcomeBucket]:
        oldest = _number_of(now_ns) - BUCKETS
        return (each for each in self._models.get(model, ()) if each.number > oldest)


def _number_of(now_ns: int) -> int:
    return now_ns // (BUCKET_S * _NANOSECONDS_PER_SECOND)


def bin_of(duration_ns: int) -> int:
    """Returns the number of the latency bin that a duration falls into."""
    if duration_ns <= _SHORTEST_NS:
        return 0
    return min(_BINS, int(math.log2(duration_ns / _SHORTEST_NS) * _BINS_PER_OCTAVE))


def percentile_ns(bins: Counter[int], share: float) -> int:
    """Returns the geometric middle of the bin with the given quantile; 0 if there are no bins.

    Args:
        bins: Number of durations by latency bin.
        share: The quantile, from 0 to 1.
    """
    wanted = math.ceil(bins.total() * share)
    for number in sorted(bins):
        wanted -= bins[number]
        if wanted <= 0:
            return round(_SHORTEST_NS * 2 ** ((number + 0.5) / _BINS_PER_OCTAVE))
    return 0


class FinishedRequest(msgspec.Struct, frozen=True):
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
