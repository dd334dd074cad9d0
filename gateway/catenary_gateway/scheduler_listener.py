"""Dispatch of the scheduler's messages to the parts of a gateway that they concern."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from catenary_gateway.admission.readiness import Readiness
from catenary_gateway.catalog import Catalog
from catenary_gateway.data_plane import DataPlane
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_gateway.scheduler_link import MessageHandlers, SchedulerListener
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.errors import Overloaded
from catenary_services.transport.interface import EndpointAddress
from catenary_services.version import software_version


class PeerHub(Protocol):
    """The part of `catenary_services.transport.hub.TransportHub` that the router uses."""

    @property
    def addresses(self) -> Sequence[EndpointAddress]:
        """The addresses at which this process receives frames."""
        ...

    def update_directory(self, peers: Iterable[common_pb2.Peer]) -> None:
        """Replaces the peers that this process can send frames to."""
        ...


class MessageRouter:
    """A router from the scheduler's messages to the planes and to the owners of tables."""

    def __init__(
        self,
        gateway_id: str,
        planes: tuple[DataPlane, SessionPlane],
        catalog: Catalog,
        codecs: TextCodecs,
        readiness: Readiness,
        hub: PeerHub,
    ) -> None:
        self._gateway_id = gateway_id
        self._incarnation = random.SystemRandom().getrandbits(63)
        self._plane, self._sessions = planes
        self._catalog = catalog
        self._codecs = codecs
        self._readiness = readiness
        self._hub = hub
        self.handlers: MessageHandlers = {
            "dispatch": self._plane.dispatch,
            "grant_window": self._plane.windows.granted,
            "extend_window": self._plane.windows.extended,
            "revoke_window": self._plane.revoke_window,
            "reject": self.rejected,
            "start_session": self.start_session,
            "directory": self.told_directory,
            "models": self.told_models,
        }
        self.told_gateways: Callable[[int], None] | None = None
        """Called with the number of gateways of the cluster whenever a directory names it."""

    def hello(self) -> scheduler_pb2.GatewayHello:
        """Returns this gateway's identity and the addresses at which it receives frames."""
        addresses = [
            common_pb2.TransportAddress(
                transport=address.transport, address=address.address, host_id=address.host_id
            )
            for address in self._hub.addresses
        ]
        peer = common_pb2.Peer(
            peer_id=self._gateway_id, incarnation=self._incarnation, addresses=addresses
        )
        return scheduler_pb2.GatewayHello(
            gateway_id=self._gateway_id,
            incarnation=self._incarnation,
            peer=peer,
            software_version=software_version(),
            takes_windows=True,
        )

    def connected(self, epoch: int, mine: Callable[[int], bool] | None = None) -> None:
        """Submits unfinished requests to a scheduler that has connected.

        Args:
            epoch: The scheduler's epoch.
            mine: Says by its number whether a request belongs to that scheduler; None: all do.
        """
        self._plane.connected(mine)
        self._sessions.connected(mine)
        self._readiness.connected()

    def disconnected(self) -> None:
        """Notes the loss of the scheduler. Unfinished requests go on; readiness may end later."""
        self._readiness.disconnected()

    def rejected(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a request that the scheduler has given up."""
        # Both planes take numbers from one series, so only one of them has this request.
        self._plane.reject(order)
        self._sessions.reject(order)

    def start_session(self, order: scheduler_pb2.StartSession) -> None:
        """Opens a session, or opens it again, on the chain that the scheduler chose."""
        self._sessions.start(order)

    def told_directory(self, directory: scheduler_pb2.Directory) -> None:
        """Takes over the peers of the cluster and the number of its gateways."""
        self._hub.update_directory(directory.peers)
        if self.told_gateways is not None and directory.gateways:
            self.told_gateways(directory.gateways)

    def told_models(self, table: scheduler_pb2.ModelTable) -> None:
        """Takes over the table of models that can be requested."""
        self._catalog.update(table)
        self._codecs.expect(m.key for m in self._catalog.models() if m.generates or m.text_tokens)
        self._readiness.refresh()


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
    """A listener that answers audits, and does with every other message what another one does."""

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
        self.handlers: MessageHandlers = {**listener.handlers, "report_unanswered": self._asked}
        self.hello = listener.hello
        self.disconnected = listener.disconnected

    def connected(self, epoch: int) -> None:
        """Submits all unfinished requests, and then reports that there are no others.

        The report lets the scheduler forget requests that ended while it was not connected.
        """
        self._listener.connected(epoch)
        self._answer(0)

    def _asked(self, order: scheduler_pb2.ReportUnanswered) -> None:
        self._answer(order.number)

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
