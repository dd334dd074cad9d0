"""The gateways a leader knows, and messages to them."""

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
    """A request whose way is traced."""

    traceparent: str
    arrived_unix_ns: int


@dataclass(slots=True)
class GatewayState:
    """One gateway process, over however many sessions it takes."""

    gateway_id: GatewayId
    incarnation: int
    peer: common_pb2.Peer
    session: GatewayStream | None = None
    lost_s: float = 0.0
    """When its session ended, on `time.monotonic`; meaningless while it has one."""
    open: set[int] = field(default_factory=set)
    """Requests neither finished nor refused."""
    software_version: str = ""
    """Empty: it did not say."""


class GatewayRegistry:
    """Every gateway, there or away for a moment.

    Attributes:
        gateways: By their ids.
        sampled: The requests whose way is traced.
    """

    def __init__(self) -> None:
        self.gateways: dict[GatewayId, GatewayState] = {}
        self.sampled: dict[RequestId, SampledRequest] = {}

    def send(self, gateway_id: GatewayId, message: Message) -> None:
        """Sends to a gateway, if it is there; otherwise it resubmits what it has not heard of."""
        gateway = self.gateways.get(gateway_id)
        if gateway is not None and gateway.session is not None:
            gateway.session.send(message)

    def broadcast(self, message: Message) -> None:
        """Sends to every gateway that is there."""
        for gateway in self.gateways.values():
            if gateway.session is not None:
                gateway.session.send(message)

    def refuse(self, command: Reject, now: Nanoseconds) -> None:
        """Tells a gateway that a request fails, and forgets it."""
        request = command.request
        self.sampled.pop(request, None)
        gateway = self.gateways.get(request.gateway)
        if gateway is not None:
            gateway.open.discard(request.number)
            if gateway.session is not None:
                gateway.session.send(reject_message(command, now))

    def forget(self, request: RequestId) -> None:
        """A request is not open at its gateway any more, whatever is said of it later."""
        gateway = self.gateways.get(request.gateway)
        if gateway is not None:
            gateway.open.discard(request.number)
        self.sampled.pop(request, None)

    def connected(self) -> list[GatewayState]:
        """Returns those that are there."""
        return [gateway for gateway in self.gateways.values() if gateway.session is not None]

    def known(self) -> frozenset[GatewayId]:
        """Returns every gateway, there or away for a moment."""
        return frozenset(self.gateways)

    def open_requests(self) -> frozenset[RequestId]:
        """Returns the requests neither finished nor refused."""
        gateways = self.gateways.values()
        return frozenset(RequestId(g.gateway_id, number) for g in gateways for number in g.open)

    def export(self, metrics: Metrics) -> None:
        """Shows how many are there."""
        metrics.gateways.set(len(self.connected()))
