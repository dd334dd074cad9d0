"""The gateways a leader knows, and what their streams need of the term they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch.events import AdoptedSession, Event
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.domain.ids import BatchId, Epoch, GatewayId, ModelKey, Nanoseconds, RequestId
from catenary_services.domain.latency import TokenObjectives

GatewayStream = PeerStream[scheduler_pb2.SchedulerToGatewayMessage]


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


class GatewayStreamLeader(Protocol):
    """What the sessions need to know of the term they belong to."""

    @property
    def epoch(self) -> Epoch:
        """The present fencing epoch."""
        ...

    def feed(self, event: Event, now: Nanoseconds) -> None:
        """Gives an event to the dispatcher."""
        ...

    def requests_in(self, batch: BatchId) -> list[RequestId]:
        """Returns the requests with rows in a batch of this term; none if it is forgotten."""
        ...

    def greet_gateway(self, session: GatewayStream) -> None:
        """Sends welcome, directory and model table."""
        ...

    def gateways_changed(self) -> None:
        """Called when a gateway came or went."""
        ...

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Returns a deployed model; the version may be empty."""
        ...

    def is_ready(self, model: ModelKey) -> bool:
        """True if requests for it can be dispatched now."""
        ...

    @property
    def audits(self) -> GatewayAudit:
        """What is done about what gateways say they wait for."""
        ...

    @property
    def plausibility(self) -> GatewayPlausibility:
        """Who knows what cannot be true."""
        ...

    @property
    def sessions(self) -> SessionLookup:
        """What is known of sessions that generate text."""
        ...


class GatewayPlausibility(Protocol):
    """Who knows what cannot be true."""

    def believes_gateway(self, gateway: GatewayId, message: scheduler_pb2.GatewayMessage) -> bool:
        """Returns whether what a gateway says may be true."""
        ...


class GatewayAudit(Protocol):
    """What is done about what gateways say they wait for."""

    def gateway_says(self, gateway: GatewayId, message: scheduler_pb2.Unanswered) -> None:
        """A gateway answers an audit."""
        ...

    def gone(self, who: GatewayId) -> None:
        """A gateway is another one now, or came back: what it said is over."""
        ...


class SessionLookup(Protocol):
    """What the sessions of gateways need to know of sessions that generate text."""

    def generates(self, model: ModelKey) -> bool:
        """True if a deployed model generates text."""
        ...

    def objectives(self, model: ModelKey) -> TokenObjectives | None:
        """Returns what requests of a model are held to that name no objectives."""
        ...

    def adopted(self, message: scheduler_pb2.SubmitSession) -> AdoptedSession | None:
        """Returns the session a request names that generates for it already."""
        ...
