"""The rows of one gateway that go by dispatch windows: which, when they leave, and what is told.

A batch leaves at once if its path is idle, and when it is full. While a batch is under way, rows
wait for the first device to be free, together (Algorithm 1 with one pipeline). Rows for which a
window has no place, or that would be late by it, are the scheduler's, as all rows are without one.

Whoever uses this calls `look` whenever something happened and at `next_wakeup`, and does what it
says.
"""

from __future__ import annotations

from typing import NamedTuple

from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    BatchId,
    ModelKey,
    Nanoseconds,
)
from catenary_services.domain.windows.window import LATE_NS, DispatchWindow, WindowBatch

_MARGIN_NS = NANOSECONDS_PER_MILLISECOND
"""Rows that would finish less than this before their deadline are the scheduler's."""
_SHORTEST_RENEWAL_NS = 2 * NANOSECONDS_PER_MILLISECOND
"""More time is asked for at least this long before a window ends."""
_RENEWAL_SHARE = 4
"""More time is asked for when one part in so many of a window is left."""
FEWEST_USES = 2
"""A window of which fewer batches were used did not pay."""


class WindowRows(NamedTuple):
    """All rows of a request, which go in one batch."""

    request: int
    """The number of the request at its gateway."""
    rows: int
    deadline_ns: Nanoseconds


class WindowOrder(NamedTuple):
    """A batch to be sent now; the rows of its requests lie in it one after the other."""

    window: DispatchWindow
    batch: WindowBatch
    requests: tuple[WindowRows, ...]


class WindowUse(NamedTuple):
    """A report of a window to the scheduler."""

    window: BatchId
    model: ModelKey
    number: int
    """Counts the reports of a window; an extension answers one of them."""
    first_batch: BatchId
    """Id of the first batch that was not told before."""
    rows: tuple[int, ...]
    """Rows of it and of those that follow it."""
    requests: int
    renew: bool
    """True: more time is wanted. False: nothing more is sent by this window."""
    busy_ns: tuple[Nanoseconds, ...]
    """Time that each hop has yet to work on what was sent."""


class WindowActions(NamedTuple):
    """The batches, submissions and reports that are due now."""

    orders: list[WindowOrder]
    submissions: list[int]
    """Numbers of requests that are the scheduler's from now on."""
    reports: list[WindowUse]


class _WindowInUse:
    """A window, the rows that wait for it, and what the scheduler was not told yet."""

    __slots__ = (
        "asked_ns",
        "began_ns",
        "first_untold",
        "requests",
        "told",
        "untold",
        "used",
        "waiting",
        "waiting_rows",
        "window",
    )

    def __init__(self, window: DispatchWindow, now: Nanoseconds) -> None:
        self.window = window
        self.waiting: list[WindowRows] = []
        self.waiting_rows = 0
        self.untold: list[int] = []
        self.first_untold = window.next_batch
        self.requests = 0
        self.used = 0
        """Number of batches since the window was granted or extended."""
        self.told = 0
        self.asked_ns: Nanoseconds = -1
        """Moment at which more time was asked for; -1 if that is not open."""
        self.began_ns = now

    @property
    def renewal_ns(self) -> Nanoseconds:
        """The moment at which more time is asked for; the end of the window if none is."""
        end = self.window.end_ns
        if self.asked_ns >= 0 or self.used < FEWEST_USES or not self.window.batches_left:
            return end
        return end - max(_SHORTEST_RENEWAL_NS, (end - self.began_ns) // _RENEWAL_SHARE)


class WindowQueue:
    """The windows of a gateway by model, their waiting rows, and batches without an answer.

    Invariant: a request that was taken (`offer`) is in exactly one place: it waits, or it is in a
    batch without an answer, or it was given back as a submission, or its batch was answered.
    """

    def __init__(self) -> None:
        self._by_model: dict[ModelKey, _WindowInUse] = {}
        self._sent: dict[BatchId, WindowOrder] = {}
        self._actions = WindowActions([], [], [])

    @property
    def is_idle(self) -> bool:
        """True if there is neither a window nor a batch without an answer."""
        return not self._by_model and not self._sent

    def window_of(self, model: ModelKey) -> DispatchWindow | None:
        """Returns the window of a model, which may be over; None if there is none."""
        used = self._by_model.get(model)
        return used.window if used is not None else None

    def asked_ns(self, window: BatchId, number: int) -> Nanoseconds | None:
        """Returns when the report with this number asked for more time; None if no answer is due.

        Times of an answer count from that moment, so that no clock and no delay makes the end of a
        window later than the scheduler's.
        """
        used = self._find(window)
        if used is None or used.asked_ns < 0 or used.told != number:
            return None
        return used.asked_ns

    # What happens

    def granted(self, window: DispatchWindow, now: Nanoseconds) -> None:
        """Takes a window; one of the same model that it replaces is given back."""
        before = self._by_model.get(window.model)
        if before is not None:
            if before.window.window == window.window:
                return
            self._give_back(before, now)
        self._by_model[window.model] = _WindowInUse(window, now)

    def extended(
        self, window: BatchId, number: int, ends_ns: tuple[Nanoseconds, ...], now: Nanoseconds
    ) -> None:
        """Takes more time for a window."""
        used = self._find(window)
        if used is None or used.asked_ns < 0 or used.told != number:
            return
        used.asked_ns = -1
        used.used = 0
        used.began_ns = now
        used.window.extend(ends_ns)

    def revoked(self, window: BatchId, lost: bool, now: Nanoseconds) -> None:
        """Gives a window back; if it is `lost`, its batches bring no results, and are redone."""
        used = self._find(window)
        if used is not None:
            self._give_back(used, now)
        if lost:
            for batch in [b for b, order in self._sent.items() if order.window.window == window]:
                self._redo(batch)

    def offer(self, model: ModelKey, rows: WindowRows, now: Nanoseconds) -> bool:
        """Takes a request if it can go by a window; False: it is the scheduler's."""
        used = self._by_model.get(model)
        if used is None or rows.rows > used.window.batch_rows or now >= used.window.end_ns:
            return False
        window = used.window
        if used.waiting_rows + rows.rows > window.batch_rows:
            self._send(used, now)
        placed = window.place(used.waiting_rows + rows.rows, now)
        if placed is None:
            return False
        deadline = rows.deadline_ns
        for each in used.waiting:
            deadline = min(deadline, each.deadline_ns)
        if placed.finish_ns + _MARGIN_NS > deadline:
            return False
        used.waiting.append(rows)
        used.waiting_rows += rows.rows
        if used.waiting_rows >= window.batch_rows:
            self._send(used, now)
        return True

    def withdraw(self, model: ModelKey, request: int) -> None:
        """Forgets a request that ended while it waited."""
        used = self._by_model.get(model)
        if used is not None:
            used.waiting = [each for each in used.waiting if each.request != request]
            used.waiting_rows = sum([each.rows for each in used.waiting])

    def answered(self, batch: BatchId, now: Nanoseconds) -> None:
        """Notes that the result of a batch is there."""
        order = self._sent.pop(batch, None)
        if order is not None:
            order.window.answered(batch, now)

    def failed(self, batch: BatchId, now: Nanoseconds) -> None:
        """Handles a batch that brings no result: its rows are the scheduler's, the window over."""
        order = self._sent.get(batch)
        if order is None:
            return
        self._redo(batch)
        used = self._find(order.window.window)
        if used is not None:
            self._give_back(used, now)

    def clear(self) -> list[int]:
        """Forgets all windows, and returns the numbers of the requests that went by them.

        The scheduler that granted them is gone, or another one leads.
        """
        numbers = [each.request for order in self._sent.values() for each in order.requests]
        for used in self._by_model.values():
            numbers += [each.request for each in used.waiting]
        self._by_model.clear()
        self._sent.clear()
        self._actions = WindowActions([], [], [])
        return numbers

    # What follows

    def look(self, now: Nanoseconds) -> WindowActions:
        """Returns the batches, submissions and reports that are due now."""
        for used in list(self._by_model.values()):
            window = used.window
            if used.waiting and window.idle_ns <= now:
                self._send(used, now)
            if now >= window.end_ns:
                self._give_back(used, now)
            elif now >= used.renewal_ns:
                used.asked_ns = now
                self._report(used, True, now)
        self._hand_over_late(now)
        actions, self._actions = self._actions, WindowActions([], [], [])
        return actions

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns when to look again at the latest; None if nothing waits for time to pass."""
        moment: Nanoseconds | None = None
        for used in self._by_model.values():
            next_ns = used.renewal_ns
            if used.waiting:
                next_ns = min(next_ns, used.window.idle_ns)
            if moment is None or next_ns < moment:
                moment = next_ns
        for order in self._sent.values():
            late_ns = order.batch.finish_ns + LATE_NS
            if moment is None or late_ns < moment:
                moment = late_ns
        return moment

    # Inside

    def _find(self, window: BatchId) -> _WindowInUse | None:
        for used in self._by_model.values():
            if used.window.window == window:
                return used
        return None

    def _send(self, used: _WindowInUse, now: Nanoseconds) -> None:
        """Sends the rows that wait; without a place for them they are the scheduler's."""
        requests, rows = tuple(used.waiting), used.waiting_rows
        used.waiting, used.waiting_rows = [], 0
        if not requests:
            return
        placed = used.window.place(rows, now)
        deadline = min([each.deadline_ns for each in requests])
        if placed is None or placed.finish_ns > deadline:
            self._actions.submissions.extend([each.request for each in requests])
            return
        used.window.send(placed, now)
        order = WindowOrder(used.window, placed, requests)
        self._sent[placed.batch] = order
        self._actions.orders.append(order)
        used.untold.append(rows)
        used.requests += len(requests)
        used.used += 1

    def _give_back(self, used: _WindowInUse, now: Nanoseconds) -> None:
        """Ends a window: rows that wait are the scheduler's, which learns what was sent."""
        del self._by_model[used.window.model]
        self._actions.submissions.extend([each.request for each in used.waiting])
        used.waiting, used.waiting_rows = [], 0
        self._report(used, False, now)

    def _report(self, used: _WindowInUse, renew: bool, now: Nanoseconds) -> None:
        used.told += 1
        self._actions.reports.append(
            WindowUse(
                used.window.window,
                used.window.model,
                used.told,
                used.first_untold,
                tuple(used.untold),
                used.requests,
                renew,
                () if renew else used.window.busy_ns(now),
            )
        )
        used.first_untold = used.window.next_batch
        used.untold = []
        used.requests = 0

    def _redo(self, batch: BatchId) -> None:
        order = self._sent.pop(batch)
        self._actions.submissions.extend([each.request for each in order.requests])

    def _hand_over_late(self, now: Nanoseconds) -> None:
        """Gives the rows of late batches to the scheduler, which watches over them from now on."""
        late = [b for b, each in self._sent.items() if each.batch.finish_ns + LATE_NS <= now]
        for batch in late:
            window = self._sent[batch].window.window
            self._redo(batch)
            used = self._find(window)
            if used is not None:
                self._give_back(used, now)
