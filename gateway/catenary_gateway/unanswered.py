"""Reports of a gateway's unanswered requests, which the scheduler compares with its own book."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from catenary_gateway.scheduler_link import SchedulerListener
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import Overloaded


class AuditedPlane(Protocol):
    """The part of the data plane and the session plane that audits use."""

    def waits_for(self, now_ns: int) -> list[scheduler_pb2.UnansweredRequest]:
        """Returns every unanswered request, as of `now_ns` on the monotonic clock."""
        ...


class AuditLink(Protocol):
    """The part of `SchedulerLink` that audits use."""

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message behind all that were queued before."""
        ...


class AuditingListener:
    """A listener that answers audits and passes every other message on to another listener."""

    def __init__(
        self,
        listener: SchedulerListener,
        link: AuditLink,
        planes: tuple[AuditedPlane, ...],
        mine: Callable[[int], bool] | None = None,
    ) -> None:
        """Creates the listener of one scheduler.

        `mine` says by its number whether a request waits for that scheduler; None: all do.
        """
        self._listener = listener
        self._link = link
        self._planes = planes
        self._mine = mine
        self.hello = listener.hello
        self.disconnected = listener.disconnected

    def connected(self, epoch: int) -> None:
        """Submits all unfinished requests, and then reports that there are no others.

        The report lets the scheduler forget requests that ended while it was not connected.
        """
        self._listener.connected(epoch)
        self._answer(0)

    def received(self, message: scheduler_pb2.SchedulerToGatewayMessage) -> None:
        """Answers an order to report unanswered requests; passes other messages on."""
        if message.WhichOneof("kind") != "report_unanswered":
            self._listener.received(message)
            return
        self._answer(message.report_unanswered.number)

    def _answer(self, number: int) -> None:
        now_ns = time.monotonic_ns()
        answer = scheduler_pb2.Unanswered(number=number)
        for plane in self._planes:
            for request in plane.waits_for(now_ns):
                if self._mine is None or self._mine(request.request_id):
                    answer.requests.append(request)
        # A scheduler that does not read is about to be lost and needs no report.
        with suppress(Overloaded):
            self._link.send(scheduler_pb2.GatewayMessage(unanswered=answer))
