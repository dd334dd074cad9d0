"""Timelines for operators: bookings of every device and link, as offsets from now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.book import Reservation
from catenary_scheduler.observed.timelines import LONGEST_NS, Interval, ResourceUse
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds

_BACK_NS = 2 * NANOSECONDS_PER_SECOND
_AHEAD_NS = NANOSECONDS_PER_SECOND
_MOST_BOOKINGS = 10_000
_AT_ONCE = 128
"""After this many batches the report yields to the other work of the scheduler."""


async def timelines_of(
    view: ClusterView, request: admin_pb2.GetTimelinesRequest
) -> admin_pb2.GetTimelinesResponse:
    """Returns booked and real times of every device and link within the window of the request.

    If there is too much for one answer, the oldest batches are left out.
    """
    back_ns = min(request.back_ns or _BACK_NS, LONGEST_NS)
    report = _Report(view, back_ns, min(request.ahead_ns or _AHEAD_NS, LONGEST_NS))
    for used in view.spans():
        report.add(used)
    report.add_restored(view.reservations())
    for number, entry in enumerate(reversed(view.batch_timelines())):
        if report.is_full:
            break
        if number % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        over = not view.is_in_flight(entry.command.batch)
        for used in entry.uses():
            report.add(used, over=over)
    return report.answer()


class _Report:
    """A GetTimelines answer under construction."""

    def __init__(self, view: ClusterView, back_ns: Nanoseconds, ahead_ns: Nanoseconds) -> None:
        self._now = now_ns()
        self._window = self._now - back_ns, self._now + ahead_ns
        self._view = view
        self._servers = {agent: record.agent.server for agent, record in view.registry.items()}
        self._bookings: dict[tuple[str, str], list[admin_pb2.Booking]] = {}
        self._count = 0
        for agent, server in self._servers.items():  # idle devices and links have a line, too
            for line in (("gpu", agent), ("uplink", server), ("downlink", server)):
                self._bookings[line] = []

    @property
    def is_full(self) -> bool:
        """True if the answer holds as many bookings as it may."""
        return self._count >= _MOST_BOOKINGS

    def add(self, used: ResourceUse, *, over: bool = False) -> None:
        """Adds a use; if its batch is `over`, a booking for the future is left out."""
        begin, end = self._window
        known = [each for each in (used.booked, used.real) if each is not None]
        if not any(each[0] < end and each[1] > begin for each in known) or self.is_full:
            return
        if over and used.real is None and used.booked is not None and used.booked[0] > self._now:
            return
        booking = admin_pb2.Booking(batch_id=used.batch, model=str(used.model), rows=used.rows)
        self._enter(booking, used.booked, used.real)
        for line in self._lines(used.agent, used.sender):
            self._bookings.setdefault(line, []).append(booking)
            self._count += 1

    def add_restored(self, reservations: list[Reservation]) -> None:
        """Adds reservations of an earlier leader, whose batches this leader did not dispatch."""
        begin, end = self._window
        for each in reservations:
            if each.slots or self._view.has_timeline(each.batch) or self.is_full:
                continue
            if each.start_ns >= end or each.end_ns <= begin:
                continue
            kind, _, owner = each.resource.partition("/")
            booking = admin_pb2.Booking(batch_id=each.batch)
            interval = each.start_ns, each.end_ns
            self._enter(booking, *((None, interval) if each.done else (interval, None)))
            self._bookings.setdefault((kind, owner), []).append(booking)
            self._count += 1

    def answer(self) -> admin_pb2.GetTimelinesResponse:
        complete = self._view.is_complete(self._window[0]) and not self.is_full
        answer = admin_pb2.GetTimelinesResponse(truncated=not complete)
        for (kind, owner), bookings in sorted(self._bookings.items(), key=lambda item: item[0]):
            bookings.sort(key=lambda each: each.booked_start_ns or each.real_start_ns)
            answer.resources.add(kind=kind, owner=owner, bookings=bookings, group=self._view.group)
        return answer

    def _lines(self, agent: AgentId, sender: AgentId | None) -> Iterator[tuple[str, str]]:
        if sender is None:
            yield "gpu", agent
            return
        if sender in self._servers:
            yield "uplink", self._servers[sender]
        if agent in self._servers:
            yield "downlink", self._servers[agent]

    def _enter(
        self, booking: admin_pb2.Booking, booked: Interval | None, real: Interval | None
    ) -> None:
        """Writes moments as nanoseconds from now; unknown ones stay 0."""
        if booked is not None:
            booking.booked_start_ns, booking.booked_end_ns = (each - self._now for each in booked)
        if real is not None:
            booking.real_start_ns, booking.real_end_ns = (each - self._now for each in real)
