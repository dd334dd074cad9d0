"""How much a gateway holds at once. What does not fit is refused at once, never queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from catenary_services.errors import Overloaded, PayloadTooLarge, Unavailable
from catenary_services.grpc.grpc_receiving import MOST_OF_ONE_SOURCE

_SHORTEST_RETRY_NS = 20_000_000
_LONGEST_RETRY_NS = 2_000_000_000
_DRAIN_RETRY_NS = 1_000_000_000
_SMOOTHING = 0.1


class Admission:
    """Counts unanswered requests and their bytes."""

    def __init__(self, max_bytes: int, max_requests: int, max_request_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self.max_request_bytes = max_request_bytes
        self.bytes = 0
        self.requests = 0
        self.draining = False
        self._arriving: Counter[str] = Counter()
        """Bytes of bodies that are no requests yet, by who sends them."""
        self._usual_ns = float(_SHORTEST_RETRY_NS)

    def admit(self, nbytes: int) -> Lease:
        """Returns a lease on `nbytes`; leave it to give them back.

        Raises:
            PayloadTooLarge: more than one request may ever have.
            Overloaded: too much is held already; says when to come back.
            Unavailable: this gateway is draining.
        """
        self.precheck()
        self.require_size(nbytes)
        self.require_room(nbytes)
        self.requests += 1
        self.bytes += nbytes
        return Lease(self, nbytes)

    def precheck(self) -> None:
        """Returns if one more request, of whatever size, may be let in.

        Raises:
            Overloaded: too many are held already.
            Unavailable: this gateway is draining.
        """
        if self.draining:
            raise Unavailable("this gateway is draining", retry_after_ns=_DRAIN_RETRY_NS)
        if self.requests >= self._max_requests:
            raise self.full(f"{self.requests} requests are being worked on")

    def require_size(self, nbytes: int) -> None:
        """Returns if one request may have `nbytes`.

        Raises:
            PayloadTooLarge: it may not.
        """
        if nbytes > self.max_request_bytes:
            raise PayloadTooLarge(
                f"the request has {nbytes} bytes; at most {self.max_request_bytes} are accepted"
            )

    def require_room(self, nbytes: int) -> None:
        """Returns if `nbytes` more may be held.

        Raises:
            Overloaded: they may not.
        """
        if self.bytes + nbytes > self._max_bytes:
            raise self.full(f"{self.bytes} bytes of requests are being worked on")

    def require_share(self, source: str, held: int, more: int) -> None:
        """Returns if one source may hold `more` of bodies that are no requests yet.

        Args:
            source: Who sends them.
            held: By the body that grows; it may, if its source has no other.
            more: That it grows by.

        Raises:
            Overloaded: it may not.
        """
        total = self._arriving[source]
        if total > held and total + more > MOST_OF_ONE_SOURCE:
            raise self.full(f"{total} bytes of one client's unfinished requests are held")

    def note_arriving(self, source: str, more: int) -> None:
        """Counts bytes of bodies that are no requests yet."""
        self._arriving[source] += more
        if not self._arriving[source]:
            del self._arriving[source]

    def learn(self, duration_ns: int) -> None:
        """Takes into account how long a request took, for the advice when to come back."""
        self._usual_ns += _SMOOTHING * (duration_ns - self._usual_ns)

    def full(self, why: str) -> Overloaded:
        """Returns the refusal of what finds no room, with advice when to come back."""
        # What is held now is gone after about one usual request.
        retry_ns = int(min(max(self._usual_ns, _SHORTEST_RETRY_NS), _LONGEST_RETRY_NS))
        return Overloaded(f"this gateway is full: {why}", retry_after_ns=retry_ns)


class Lease:
    """A place among the admitted; a context manager."""

    __slots__ = ("_nbytes", "_source", "admission")

    def __init__(self, admission: Admission, nbytes: int) -> None:
        self.admission = admission
        self._nbytes = nbytes
        self._source: str | None = None
        """Who sends what arrives now; None: nothing does."""

    @contextmanager
    def arriving(self, source: str) -> Iterator[None]:
        """Counts what is held within the block as an unfinished request of one source."""
        self._source = source
        self.admission.note_arriving(source, self._nbytes)
        try:
            yield
        finally:
            self._source = None
            self.admission.note_arriving(source, -self._nbytes)

    def hold(self, nbytes: int) -> None:
        """Holds `nbytes` in place of what it held.

        Raises:
            PayloadTooLarge: more than one request may ever have.
            Overloaded: too much is held already.
        """
        more = nbytes - self._nbytes
        if more > 0:
            self.admission.require_size(nbytes)
            self.admission.require_room(more)
            if self._source is not None:
                self.admission.require_share(self._source, self._nbytes, more)
        if self._source is not None:
            self.admission.note_arriving(self._source, more)
        self.admission.bytes += more
        self._nbytes = nbytes

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.admission.requests -= 1
        self.admission.bytes -= self._nbytes
