"""The limit on requests and bytes that a gateway holds; more is refused at once, never queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from catenary_services.errors import Overloaded, PayloadTooLarge, Unavailable
from catenary_services.grpc.server.receiving_budget import MOST_OF_ONE_SOURCE

_SHORTEST_RETRY_NS = 20_000_000
_LONGEST_RETRY_NS = 2_000_000_000
_DRAIN_RETRY_NS = 1_000_000_000
_SMOOTHING = 0.1


class ConcurrencyLimiter:
    """A counter of unanswered requests and their bytes, with limits on both."""

    def __init__(self, max_bytes: int, max_requests: int, max_request_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self.max_request_bytes = max_request_bytes
        self.bytes = 0
        self.requests = 0
        self.draining = False
        self._arriving: dict[str, int] = {}
        """Bytes of bodies that are not complete requests yet, by sender."""
        self._usual_ns = float(_SHORTEST_RETRY_NS)

    def admit(self, nbytes: int) -> ConcurrencyPermit:
        """Returns a permit for a request of `nbytes`; leaving it gives them back.

        Raises:
            CatenaryError: There is no room; see `take`.
        """
        self.take(nbytes)
        return ConcurrencyPermit(self, nbytes)

    def take(self, nbytes: int) -> None:
        """Counts a request of `nbytes` as held, for the permit that gives them back.

        Raises:
            PayloadTooLarge: No request may have so many bytes.
            Overloaded: Too much is held already; the error says when to come back.
            Unavailable: This gateway is draining.
        """
        self.precheck()
        self.require_size(nbytes)
        self.require_room(nbytes)
        self.requests += 1
        self.bytes += nbytes

    def precheck(self) -> None:
        """Checks that one more request, of whatever size, may be let in.

        Raises:
            Overloaded: Too many requests are held already.
            Unavailable: This gateway is draining.
        """
        if self.draining:
            raise Unavailable("this gateway is draining", retry_after_ns=_DRAIN_RETRY_NS)
        if self.requests >= self._max_requests:
            raise self.full(f"{self.requests} requests are being worked on")

    def require_size(self, nbytes: int) -> None:
        """Checks that one request may have `nbytes` bytes.

        Raises:
            PayloadTooLarge: No request may have so many bytes.
        """
        if nbytes > self.max_request_bytes:
            raise PayloadTooLarge(
                f"the request has {nbytes} bytes; at most {self.max_request_bytes} are accepted"
            )

    def require_room(self, nbytes: int) -> None:
        """Checks that `nbytes` more bytes may be held.

        Raises:
            Overloaded: Too many bytes are held already.
        """
        if self.bytes + nbytes > self._max_bytes:
            raise self.full(f"{self.bytes} bytes of requests are being worked on")

    def require_share(self, source: str, held: int, more: int) -> None:
        """Checks that one sender may hold `more` bytes of incomplete requests.

        Args:
            source: The sender: a key or an address.
            held: Bytes of the body that grows; a sender's only body may always grow.
            more: Bytes by which the body grows.

        Raises:
            Overloaded: The sender's incomplete requests hold too much.
        """
        total = self._arriving.get(source, 0)
        if total > held and total + more > MOST_OF_ONE_SOURCE:
            raise self.full(f"{total} bytes of one client's unfinished requests are held")

    def note_arriving(self, source: str, more: int) -> None:
        """Adds to the bytes that a sender's incomplete requests hold; `more` may be negative."""
        if not more:
            return
        held = self._arriving.get(source, 0) + more
        if held:
            self._arriving[source] = held
        else:
            del self._arriving[source]

    def learn(self, duration_ns: int) -> None:
        """Learns from the duration of a request, for the advice when to come back."""
        self._usual_ns += _SMOOTHING * (duration_ns - self._usual_ns)

    def full(self, why: str) -> Overloaded:
        """Returns the error for a request that finds no room, with advice when to come back."""
        # Requests held now have left after about the duration of a usual request.
        retry_ns = int(min(max(self._usual_ns, _SHORTEST_RETRY_NS), _LONGEST_RETRY_NS))
        return Overloaded(f"this gateway is full: {why}", retry_after_ns=retry_ns)


class ConcurrencyPermit:
    """A permit for one request to be held, as a context manager that gives it back."""

    __slots__ = ("_nbytes", "_requests", "_source", "admission")

    def __init__(self, admission: ConcurrencyLimiter, nbytes: int) -> None:
        self.admission = admission
        self._nbytes = nbytes
        self._requests = 1
        self._source: str | None = None
        """The sender of the body that is arriving; None while none is."""

    @contextmanager
    def arriving(self, source: str) -> Iterator[None]:
        """Counts the bytes held within the block as an incomplete request of one sender."""
        self._source = source
        self.admission.note_arriving(source, self._nbytes)
        try:
            yield
        finally:
            self._source = None
            self.admission.note_arriving(source, -self._nbytes)

    def hold(self, nbytes: int) -> None:
        """Changes the bytes it holds to `nbytes`.

        Raises:
            PayloadTooLarge: No request may have so many bytes.
            Overloaded: Too much is held already.
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

    def hold_more(self, nbytes: int) -> None:
        """Adds `nbytes` to the bytes it holds.

        Raises:
            PayloadTooLarge: No request may have so many bytes.
            Overloaded: Too much is held already.
        """
        self.hold(self._nbytes + nbytes)

    def hand_over(self) -> int:
        """Leaves what it holds to another permit of the same request, and returns the bytes."""
        nbytes, self._nbytes, self._requests = self._nbytes, 0, 0
        return nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.admission.requests -= self._requests
        self.admission.bytes -= self._nbytes
