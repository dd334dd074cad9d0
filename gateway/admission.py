"""How much a gateway holds at once. What does not fit is refused at once, never queued."""

from __future__ import annotations

from types import TracebackType

from services.errors import Overloaded, PayloadTooLarge, Unavailable

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
        self._usual_ns = float(_SHORTEST_RETRY_NS)

    def admit(self, nbytes: int) -> Lease:
        """Returns a lease on `nbytes`; leave it to give them back.

        Raises:
            PayloadTooLarge: more than one request may ever have.
            Overloaded: too much is held already; says when to come back.
            Unavailable: this gateway is draining.
        """
        if self.draining:
            raise Unavailable("this gateway is draining", retry_after_ns=_DRAIN_RETRY_NS)
        if nbytes > self.max_request_bytes:
            raise PayloadTooLarge(
                f"the request has {nbytes} bytes; at most {self.max_request_bytes} are accepted"
            )
        if self.requests >= self._max_requests:
            raise self._full(f"{self.requests} requests are being worked on")
        if self.bytes + nbytes > self._max_bytes:
            raise self._full(f"{self.bytes} bytes of requests are being worked on")
        self.requests += 1
        self.bytes += nbytes
        return Lease(self, nbytes)

    def learn(self, duration_ns: int) -> None:
        """Takes into account how long a request took, for the advice when to come back."""
        self._usual_ns += _SMOOTHING * (duration_ns - self._usual_ns)

    def _full(self, why: str) -> Overloaded:
        # What is held now is gone after about one usual request.
        retry_ns = int(min(max(self._usual_ns, _SHORTEST_RETRY_NS), _LONGEST_RETRY_NS))
        return Overloaded(f"this gateway is full: {why}", retry_after_ns=retry_ns)


class Lease:
    """A place among the admitted; a context manager."""

    __slots__ = ("_nbytes", "admission")

    def __init__(self, admission: Admission, nbytes: int) -> None:
        self.admission = admission
        self._nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back what turned out not to be needed."""
        if nbytes < self._nbytes:
            self.admission.bytes -= self._nbytes - nbytes
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
