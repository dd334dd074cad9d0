"""Dispatch windows as the scheduler grants them: time on a path that one gateway has (ADR 0058).

A window is booked like a batch: an interval on each device and on the links before it, into which
nothing else is booked, with an expiry. Batches that the gateway sends by it are not booked singly.
It ends by a report of its gateway, or by itself; until then its time is taken, also once it was
revoked, because the gateway may not have heard of that yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum

from catenary_scheduler.book import Book, PathHop, Timeline
from catenary_scheduler.dispatch.events import (
    Command,
    ExtendWindow,
    GrantWindow,
    RevokeWindow,
    StageReported,
    WindowOver,
    WindowReported,
    earlier,
)
from catenary_scheduler.dispatch.pooled.routes import Route
from catenary_scheduler.dispatch.pooled.tracking import Request
from catenary_scheduler.dispatch.pooled.window_usage import WindowUsage
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    Nanoseconds,
    ResourceId,
)
from catenary_services.domain.windows.window import WindowHop
from catenary_services.domain.windows.window_queue import FEWEST_USES
from catenary_services.errors import InternalError

WINDOW_IDS = 256
"""Ids that a window takes: its own, those of its bookings, and those of its batches."""
_LARGEST_BATCH = 256
"""Windows are not granted on pipelines with larger batches, whose times would be a long message."""
_KEPT_NS = NANOSECONDS_PER_SECOND
"""A window that is over is remembered for so long, for reports and failures of its batches."""


class WindowState(Enum):
    """State of a window, as its scheduler knows it."""

    OPEN = "open"
    REVOKED = "revoked"
    """The gateway was told to end it, and has not confirmed that."""
    ENDING = "ending"
    """The gateway sends nothing more; what it sent is being worked on."""
    OVER = "over"
    """Nothing of it is booked."""


_NEXT: dict[WindowState, tuple[WindowState, ...]] = {
    WindowState.OPEN: (WindowState.REVOKED, WindowState.ENDING, WindowState.OVER),
    WindowState.REVOKED: (WindowState.ENDING, WindowState.OVER),
    WindowState.ENDING: (WindowState.OVER,),
    WindowState.OVER: (),
}


class GrantedWindow:
    """A window and its bookings: for each hop its device and, if data come to it, the links."""

    __slots__ = ("bookings", "end_ns", "grant", "length_ns", "number", "state", "used")

    def __init__(
        self,
        grant: GrantWindow,
        bookings: list[tuple[int, BatchId, bool]],
        length_ns: Nanoseconds,
    ) -> None:
        self.grant = grant
        self.length_ns = length_ns
        """The time for which it is granted, and from each extension on."""
        self.bookings = bookings
        """Position, id, and whether it is of links."""
        self.end_ns: Nanoseconds = grant.hops[-1].end_ns
        self.number = 0
        """Number of the last report."""
        self.state = WindowState.OPEN
        self.used = 0
        """Number of batches since it was granted or last extended."""

    def become(self, state: WindowState) -> None:
        """Enters the next state.

        Raises:
            InternalError: It does not follow the present one.
        """
        if state not in _NEXT[self.state]:
            raise InternalError(f"a window that is {self.state.value} cannot be {state.value}")
        self.state = state


class WindowGranter:
    """All windows of one scheduler, open or over since a moment.

    Attributes:
        active: The windows that have time booked.
        ids: Ids of all windows that are remembered, ascending.
        commands: The commands that were not taken yet.
    """

    def __init__(self, book: Book, longest_ns: Nanoseconds, share: float) -> None:
        """Grants windows of `longest_ns` at most, and of a share of a request's time."""
        self.longest_ns = longest_ns
        self.usage = WindowUsage(longest_ns)
        self.counters = dict.fromkeys(
            (
                "granted_windows",
                "extended_windows",
                "revoked_windows",
                "expired_windows",
                "unused_windows",
                "window_batches",
                "window_rows",
                "window_requests",
            ),
            0,
        )
        self._book = book
        self._share = share
        self.commands: list[Command] = []
        self.active: dict[BatchId, GrantedWindow] = {}
        self.ids: list[BatchId] = []
        self._windows: dict[BatchId, GrantedWindow] = {}

    def take_commands(self) -> list[Command]:
        """Returns the commands since the last call."""
        commands, self.commands = self.commands, []
        return commands

    # Granting

    def is_free(self, model: ModelKey, others: Iterable[ModelKey], now: Nanoseconds) -> bool:
        """Returns True if a model has no window, and no other model wants the same devices."""
        for window in self.active.values():
            if window.grant.model == model:
                return False
        return all(self.usage.is_quiet(other, now) for other in others)

    def grant(
        self,
        request: Request,
        route: Route,
        steps: list[PathHop],
        window: BatchId,
        only_path: bool,
        now: Nanoseconds,
    ) -> bool:
        """Grants the gateway of a request the path on which its batch was just booked.

        Args:
            request: A request of the batch.
            route: The route of the batch.
            steps: The path.
            window: The id of the window; the next `WINDOW_IDS - 1` are its, too.
            only_path: True if there is no other path for the model.
            now: The moment.

        Returns:
            False if the path is not free for long enough; nothing is booked then.
        """
        model = route.partitions[0].model
        if not self.usage.is_wanted(model, request.request_id.gateway, now):
            return False
        length = min(self.longest_ns, int((request.deadline - now) * self._share))
        size = route.batch_size
        if size > _LARGEST_BATCH or length < 2 * route.chain.least_work_ns[0]:
            return False
        hops: list[WindowHop] = []
        bookings: list[tuple[int, BatchId, bool]] = []
        taken_lines: set[ResourceId] = set()
        sender: PathHop | None = None
        for at, step in enumerate(steps):
            leg = route.chain.legs[at]
            transfer: tuple[Nanoseconds, ...] = ()
            links: tuple[Timeline, ...] = ()
            if sender is not None and leg.row_bytes and sender.member.agent != step.member.agent:
                speed = min(sender.member.bytes_per_second, step.member.bytes_per_second)
                transfer = tuple(
                    [
                        -(-leg.row_bytes * rows * NANOSECONDS_PER_SECOND // speed)
                        for rows in range(1, size + 1)
                    ]
                )
                links = (sender.member.uplink, step.member.downlink)
            compute = leg.compute_ns[:size]
            longest = compute[-1] + (transfer[-1] if transfer else 0)
            start, end = now, now + length
            if hops:
                start, end = hops[-1].start_ns + hops[-1].compute_ns[0], hops[-1].end_ns + longest
            gpu = step.member.gpu
            latest = start + length // 2  # else too little is left, or batches wait on their way
            is_taken = False
            for line in (gpu, *links):
                start = max(start, line.busy_until)
                is_taken = is_taken or line.resource in taken_lines  # a path that crosses itself
                taken_lines.add(line.resource)
            is_taken = is_taken or start > latest or end - start < longest
            if is_taken or gpu.resource in self._book.slots.devices:
                for _, booking, _ in bookings:
                    self._book.release(booking)
                return False
            hops.append(
                WindowHop(step.member.agent, route.partitions[at], compute, transfer, start, end)
            )
            if links:
                bookings.append((at, BatchId(window + 1 + len(bookings)), True))
                self._book.hold(bookings[-1][1], at, links, start, end - compute[-1])
            bookings.append((at, BatchId(window + 1 + len(bookings)), False))
            self._book.hold(bookings[-1][1], at, (gpu,), start, end)
            sender = step
        taken = 1 + len(bookings)
        most_wait = length if only_path else hops[0].compute_ns[0]
        command = GrantWindow(
            window,
            request.request_id,
            model,
            tuple(hops),
            BatchId(window + taken),
            WINDOW_IDS - taken,
            most_wait,
        )
        granted = GrantedWindow(command, bookings, length)
        self.active[window] = self._windows[window] = granted
        self.ids.append(window)
        self.commands.append(command)
        self.counters["granted_windows"] += 1
        return True

    # What gateways and agents say

    def reported(self, event: WindowReported, may_go_on: bool, now: Nanoseconds) -> None:
        """Takes in what was sent by a window; extends it if `may_go_on`, or ends it."""
        window = self._windows.get(event.window)
        if window is None or window.grant.gateway != event.gateway or event.number <= window.number:
            return
        window.number = event.number
        window.used += len(event.rows)
        self.counters["window_batches"] += len(event.rows)
        self.counters["window_rows"] += sum(event.rows)
        self.counters["window_requests"] += event.requests
        if event.rows:
            self.usage.arrived(window.grant.model, event.gateway, now)
        if window.state not in (WindowState.OPEN, WindowState.REVOKED):
            return
        if not event.renew:
            self._end(window, event.busy_ns, now)
        elif may_go_on and window.state is WindowState.OPEN and window.used >= FEWEST_USES:
            self._extend(window, event.number, now)

    def stage_reported(self, event: StageReported) -> bool:
        """Corrects the book if a batch of a window took longer than the window's time.

        Returns False if no window has the batch.
        """
        window = self.of_batch(event.batch)
        if window is None:
            return False
        if window.state is not WindowState.OVER:
            for position, booking, is_of_links in window.bookings:
                if position == event.position and not is_of_links:
                    end = self._book.finish(booking)
                    if end is not None and event.compute_end_ns > end:
                        start = window.grant.hops[position].start_ns
                        self._book.correct(booking, position, start, event.compute_end_ns)
        return True

    def of_batch(self, batch: BatchId) -> GrantedWindow | None:
        """Returns the window by which a batch was sent; None if none is remembered."""
        at = bisect_right(self.ids, batch) - 1
        if at < 0:
            return None
        window = self._windows[self.ids[at]]
        return window if window.grant.has(batch) else None

    # The end of windows

    def contended(
        self,
        model: ModelKey,
        gateway: GatewayId | None,
        others: Iterable[ModelKey],
        now: Nanoseconds,
    ) -> list[GrantedWindow]:
        """Revokes the windows whose time others want.

        Args:
            model: The model that wants time.
            gateway: The gateway that asks; windows of its own for the model stay. None: none do.
            others: Models that use some of the same devices.
            now: The moment.

        Returns:
            The windows that are in the way, revoked now or before.
        """
        if not self.active:
            return []
        wanted = {model, *others}
        in_the_way = []
        for window in list(self.active.values()):
            its = window.grant.model
            if its in wanted and (its != model or window.grant.gateway != gateway):
                self.revoke(window)
                self.usage.contended(its, now)
                in_the_way.append(window)
        return in_the_way

    def revoke(self, window: GrantedWindow) -> None:
        """Tells the gateway of an open window to end it."""
        if window.state is WindowState.OPEN:
            window.become(WindowState.REVOKED)
            self._told(window, lost=False)

    def failed(self, window: GrantedWindow, now: Nanoseconds) -> None:
        """Ends a window of which a batch failed; its model gets none for a while."""
        self.revoke(window)
        self.usage.contended(window.grant.model, now)

    def revoke_all(self) -> None:
        """Revokes all windows: what they were granted by has changed."""
        for window in self.active.values():
            self.revoke(window)

    def agent_lost(self, agent: AgentId) -> None:
        """Ends the windows on whose path an agent was; what they have sent is lost."""
        for window in list(self.active.values()):
            if any(hop.agent == agent for hop in window.grant.hops):
                self._told(window, lost=True)
                self._over(window)

    def expire(self, now: Nanoseconds) -> bool:
        """Ends the windows whose time is over; returns True if there were any."""
        ended = [window for window in self.active.values() if window.end_ns <= now]
        for window in ended:
            if window.state is not WindowState.ENDING:
                self.counters["expired_windows"] += 1
                self._judge(window, now)
            self._over(window)
        while self.ids and self._windows[self.ids[0]].end_ns + _KEPT_NS < now:
            if self._windows[self.ids[0]].state is not WindowState.OVER:
                break
            del self._windows[self.ids.pop(0)]
        return bool(ended)

    def next_end(self) -> Nanoseconds | None:
        """Returns when `expire` next ends a window; None if there is none."""
        moment: Nanoseconds | None = None
        for window in self.active.values():
            moment = earlier(moment, window.end_ns)
        return moment

    # Inside

    def _extend(self, window: GrantedWindow, number: int, now: Nanoseconds) -> None:
        """Gives a window more time if nothing is booked behind it."""
        grant = window.grant
        self.usage.used(grant.model)
        more = now + window.length_ns - grant.hops[0].end_ns
        wanted = self.usage.is_wanted(grant.model, grant.gateway, now)
        if more <= 0 or not wanted or not self._lengthen(window, more):
            return
        hops = tuple([hop._replace(end_ns=hop.end_ns + more) for hop in grant.hops])
        window.grant = GrantWindow(
            grant.window,
            grant.request,
            grant.model,
            hops,
            grant.first_batch,
            grant.batches,
            grant.most_wait_ns,
        )
        window.end_ns = hops[-1].end_ns
        window.used = 0
        ends = tuple([hop.end_ns for hop in hops])
        self.commands.append(ExtendWindow(grant.window, grant.gateway, number, ends))
        self.counters["extended_windows"] += 1

    def _lengthen(self, window: GrantedWindow, more: Nanoseconds) -> bool:
        """Moves the ends of all bookings of a window, or of none."""
        book = self._book
        done: list[tuple[BatchId, Nanoseconds]] = []
        for position, booking, is_of_links in window.bookings:
            hop = window.grant.hops[position]
            wanted = hop.end_ns + more - (hop.compute_ns[-1] if is_of_links else 0)
            end = book.finish(booking)  # later than granted if a late batch displaced it
            if end is None or (end < wanted and not book.resize(booking, wanted)):
                for resized, before in done:
                    book.resize(resized, before)
                return False
            done.append((booking, end))
        return True

    def _end(
        self, window: GrantedWindow, busy_ns: tuple[Nanoseconds, ...], now: Nanoseconds
    ) -> None:
        """Frees the time of a window that its gateway will not use."""
        self._judge(window, now)
        window.become(WindowState.ENDING)
        latest = now
        for position, booking, _ in window.bookings:
            busy = busy_ns[position] if position < len(busy_ns) else 0
            end = self._book.finish(booking)
            if end is None:
                continue
            if not busy:
                self._book.release(booking)
            elif now + busy < end:
                self._book.resize(booking, now + busy)
            latest = max(latest, min(end, now + busy))
        window.end_ns = latest
        if latest <= now:
            self._over(window)

    def _judge(self, window: GrantedWindow, now: Nanoseconds) -> None:
        if window.used < FEWEST_USES and window.state is WindowState.OPEN:
            self.counters["unused_windows"] += 1
            self.usage.unused(window.grant.model, now)

    def _told(self, window: GrantedWindow, *, lost: bool) -> None:
        self.commands.append(RevokeWindow(window.grant.window, window.grant.gateway, lost))
        self.counters["revoked_windows"] += 1

    def _over(self, window: GrantedWindow) -> None:
        window.become(WindowState.OVER)
        for _, booking, _ in window.bookings:
            self._book.release(booking)
        del self.active[window.grant.window]
        self.commands.append(WindowOver(window.grant.window))
