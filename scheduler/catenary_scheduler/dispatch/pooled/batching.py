"""PPipe's Algorithm 1: which pipeline, which batch size, and whether now, later or never.

Departures from the paper, all of which let more requests be served:

* A pipeline that cannot meet the deadline even with one row does not decide alone: the others are
  tried in the order of their waiting times before a request is dropped.
* Sizes whose work alone takes longer than the deadline allows are skipped without a probe.
* Rows whose own deadline is before the batch would finish are not put into it. (This is only
  possible where priorities are mixed; otherwise the head has the earliest deadline.)
* Waiting for a full batch may be bounded, see `PooledConfig.max_linger_ns`. A batch of texts that
  leaves out rows for their lengths does not linger.
* Batches of texts are counted in units of tokens, see `text_batches`; all sizes here are in these.
"""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.book import Book, Path
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.routes import Route
from catenary_scheduler.dispatch.pooled.row_queue import RowQueue, WaitingRows
from catenary_services.domain.ids import Nanoseconds

# The decisions are plain classes: a dataclass takes a call to be made even where it is compiled.


class DispatchDecision:
    """Decision to send a batch of `size`, in rows or units, down `path`."""

    __slots__ = ("path", "route", "size")

    def __init__(self, route: Route, path: Path, size: int) -> None:
        self.route = route
        self.path = path
        self.size = size


class WaitDecision:
    """Decision to look again at `until`, or when something changes."""

    __slots__ = ("until",)

    def __init__(self, until: Nanoseconds) -> None:
        self.until = until


class DropDecision:
    """Decision to drop the head: even alone it would finish too late, at `earliest_finish`."""

    __slots__ = ("earliest_finish",)

    def __init__(self, earliest_finish: Nanoseconds) -> None:
        self.earliest_finish = earliest_finish


def decide(
    queue: RowQueue,
    routes: tuple[Route, ...],
    book: Book,
    config: PooledConfig,
    now: Nanoseconds,
) -> DispatchDecision | WaitDecision | DropDecision:
    """Returns the decision about the head of a queue. There must be a head and a route."""
    deadline = queue.head.request.deadline
    for planned, route in _ranked(routes, book, now):
        path = planned
        if path is None or path.finish_ns > deadline:
            most = route.batch_size if path is None else route.batch_size - 1
            path = route.chain.largest(most, deadline, now)
            if path is None or path.rows < queue.least_size(route.units):
                continue
        due = queue.due(route, path.rows, path.finish_ns)
        if not due.is_full:
            return _build_batch(queue, DispatchDecision(route, path, path.rows), due, config, now)
        if due.size < path.rows:  # a further row does not fit, and the rest need not be booked
            path = route.chain.probe(due.size, now)
        return DispatchDecision(route, path, path.rows)
    return DropDecision(
        min(
            book.probe(route.chain, queue.least_size(route.units), now).finish_ns
            for route in routes
        )
    )


def _ranked(
    routes: tuple[Route, ...], book: Book, now: Nanoseconds
) -> Sequence[tuple[Path | None, Route]]:
    """Returns routes by the waiting time of a planned batch (Algorithm 1, lines 4 to 8).

    Equal waits keep the plan's order. A single route is not probed for that: None.
    """
    if len(routes) == 1:
        return ((None, routes[0]),)
    probed = [(book.probe(route.chain, route.batch_size, now), route) for route in routes]
    probed.sort(key=_waiting_time)
    return probed


def overflow(
    queue: RowQueue, shared: tuple[Route, ...], now: Nanoseconds
) -> DispatchDecision | None:
    """Returns a batch for pools of other models, where no pool of the queue's own is in time.

    Of the routes that leave enough to their owners the one that ends first is taken; None if there
    is none.
    """
    deadline = queue.head.request.deadline
    best: tuple[Route, Path] | None = None
    for route in shared:
        least = queue.least_size(route.units)
        size = max(least, min(route.batch_size, queue.size(route.units)))
        path = route.chain.largest(size, deadline, now)
        if path is None or path.rows < least or not route.has_time_for(path, now):
            continue
        if best is None or path.finish_ns < best[1].finish_ns:
            best = route, path
    if best is None:
        return None
    route, path = best
    due = queue.due(route, path.rows, path.finish_ns)
    if due.size < path.rows:
        path = route.chain.probe(due.size, now)
    return DispatchDecision(route, path, path.rows)


def _waiting_time(candidate: tuple[Path, Route]) -> Nanoseconds:
    return candidate[0].wait_ns


def _build_batch(
    queue: RowQueue,
    full: DispatchDecision,
    due: WaitingRows,
    config: PooledConfig,
    now: Nanoseconds,
) -> DispatchDecision | WaitDecision:
    """Decides whether a batch that is not full waits for more rows (Algorithm 1, line 18)."""
    deadline = queue.head.request.deadline
    chain, waiting = full.route.chain, due.size
    if queue.head.attempt == 0:
        larger = full.path
        if waiting + 1 < full.size:
            larger = chain.probe(waiting + 1, now)
        work = larger.finish_ns - now - larger.wait_ns
        until = deadline - work - config.safety_margin_ns
        if config.max_linger_ns is not None:
            if queue.lingering_since is None:
                queue.lingering_since = now
            free = now + larger.wait_ns - config.dispatch_lead_ns
            linger_ns = 0 if due.leaves_rows else config.max_linger_ns
            until = min(until, max(queue.lingering_since + linger_ns, free))
        if until > now:
            return WaitDecision(until)
    path = chain.largest(waiting, deadline, now)
    if path is not None and path.rows >= queue.least_size(full.route.units):
        return DispatchDecision(full.route, path, path.rows)
    return DispatchDecision(
        full.route, full.path, waiting
    )  # the larger booking holds the smaller batch
