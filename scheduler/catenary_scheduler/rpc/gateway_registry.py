"""The gateways that a leader knows, and messages to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch.events import Reject
from catenary_scheduler.wire.messages import reject_message
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.domain.ids import GatewayId, Nanoseconds, RequestId
from catenary_services.telemetry.metrics import Metrics

Message = scheduler_pb2.SchedulerToGatewayMessage
GatewayStream = PeerStream[Message]


@dataclass(slots=True)
class SampledRequest:
    """A request that is traced."""

    traceparent: str
    arrived_unix_ns: int


@dataclass(slots=True)
class GatewayState:
    """State of one gateway process; it outlives a broken stream."""

    gateway_id: GatewayId
    incarnation: int
    peer: common_pb2.Peer
    session: GatewayStream | None = None
    lost_s: float = 0.0
    """Moment at which the last stream ended, on `time.monotonic`; unused while one is open."""
    open: set[int] = field(default_factory=set)
    """Numbers of the requests that are neither finished nor refused."""
    takes_windows: bool = False
    """True if it can dispatch by windows."""
    software_version: str = ""
    """The release that the gateway runs; empty if it did not say."""


class GatewayRegistry:
    """All gateways that are connected, or were until recently.

    Attributes:
        gateways: The gateways by id.
        sampled: The requests that are traced.
    """

    def __init__(self) -> None:
        self.gateways: dict[GatewayId, GatewayState] = {}
        self.sampled: dict[RequestId, SampledRequest] = {}

    def send(self, gateway_id: GatewayId, message: Message) -> None:
        """Sends a message to a gateway if it is connected.

        Otherwise the message is lost: a gateway that comes back resubmits its open requests.
        """
        gateway = self.gateways.get(gateway_id)
        if gateway is not None and gateway.session is not None:
            gateway.session.send(message)

    def broadcast(self, message: Message) -> None:
        gateways = self.gateways.values()
        PeerStream.send_all(message, [g.session for g in gateways if g.session is not None])

    def refuse(self, command: Reject, now: Nanoseconds) -> None:
        """Tells a gateway that its request failed, and forgets the request."""
        self.forget(command.request)
        self.send(command.request.gateway, reject_message(command, now))

    def forget(self, request: RequestId) -> None:
        """Removes a request from the open and the traced ones."""
        gateway = self.gateways.get(request.gateway)
        if gateway is not None:
            gateway.open.discard(request.number)
        self.sampled.pop(request, None)

    def connected(self) -> list[GatewayState]:
        """Returns the gateways that have a stream."""
        return [gateway for gateway in self.gateways.values() if gateway.session is not None]

    def known(self) -> frozenset[GatewayId]:
        """Returns the ids of all gateways, connected or lost recently."""
        return frozenset(self.gateways)

    def open_requests(self) -> frozenset[RequestId]:
        """Returns the requests that are neither finished nor refused."""
        gateways = self.gateways.values()
        return frozenset(RequestId(g.gateway_id, number) for g in gateways for number in g.open)

    def export(self, metrics: Metrics) -> None:
        metrics.gateways.set(len(self.connected()))
