"""The streams of the gateways: requests in, dispatches and refusals out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from scheduler import converters
from scheduler.clock import now_ns
from scheduler.dispatch.events import (
    Event,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
)
from scheduler.sessions import Session, Stream, first_pack, read_packs
from scheduler.waiting_room import WaitingRoom
from services.domain.ids import Epoch, GatewayId, ModelKey, Nanoseconds, RequestId
from services.errors import CatenaryError, InvalidInput, ModelNotFound, Unavailable
from services.log import get_logger
from services.telemetry.tracing import is_sampled

_log = get_logger(__name__)
Message = scheduler_pb2.SchedulerToGatewayMessage
GatewaySession = Session[scheduler_pb2.SchedulerToGatewayMessage]


@dataclass(slots=True)
class Sampled:
    """A request whose way is traced."""

    traceparent: str
    arrived_unix_ns: int


@dataclass(slots=True)
class Gateway:
    """One gateway process, over however many sessions it takes."""

    gateway_id: GatewayId
    incarnation: int
    peer: common_pb2.Peer
    session: GatewaySession | None = None
    lost_s: float = 0.0
    """When its session ended, on `time.monotonic`; meaningless while it has one."""
    open: set[int] = field(default_factory=set)
    """Requests neither finished nor refused."""


class Leader(Protocol):
    """What the sessions need to know of the term they belong to."""

    @property
    def epoch(self) -> Epoch:
        """The present fencing epoch."""
        ...

    def feed(self, event: Event, now: Nanoseconds) -> None:
        """Gives an event to the dispatcher."""
        ...

    def greet_gateway(self, session: GatewaySession) -> None:
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


class GatewaySessions:
    """All gateways of one term."""

    def __init__(self, leader: Leader, waiting: WaitingRoom) -> None:
        self._leader = leader
        self._waiting = waiting
        self.gateways: dict[GatewayId, Gateway] = {}
        self.sampled: dict[RequestId, Sampled] = {}

    async def serve(self, stream: Stream[object, object]) -> None:
        """Serves one stream until it ends.

        Raises:
            CatenaryError: why this side ended it.
        """
        pack = await first_pack(stream)
        assert isinstance(pack, scheduler_pb2.GatewayMessages)
        if not pack.messages or not pack.messages[0].HasField("hello"):
            raise InvalidInput("hello", "must be the first message of a gateway")

        async def send(messages: list[Message]) -> None:
            await stream.write(scheduler_pb2.SchedulerToGatewayMessages(messages=messages))

        session: GatewaySession = Session(send)
        gateway = self._joined(pack.messages[0].hello, session)

        def handle(packed: scheduler_pb2.GatewayMessages) -> None:
            self._handle(gateway, packed.messages)

        try:
            self._handle(gateway, pack.messages[1:])
            await session.run(read_packs(stream, session, handle))
        finally:
            self._left(gateway, session)

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
                gateway.session.send(converters.reject_message(command, now))

    def sweep(self, now_s: float, silence_s: float) -> None:
        """Ends silent sessions; gives up the requests of gateways that stayed away."""
        for gateway in list(self.gateways.values()):
            session = gateway.session
            if session is not None:
                if now_s - session.heard_s > silence_s:
                    session.close(Unavailable(f"nothing was heard for {silence_s} s"))
            elif now_s - gateway.lost_s > silence_s:
                _log.warning("gateway_lost", gateway=gateway.gateway_id, open=len(gateway.open))
                self._give_up(gateway, gateway.open)
                del self.gateways[gateway.gateway_id]
                self._leader.gateways_changed()

    def _joined(self, hello: scheduler_pb2.GatewayHello, session: GatewaySession) -> Gateway:
        if not hello.gateway_id:
            raise InvalidInput("gateway_id", "must not be empty")
        gateway_id = GatewayId(hello.gateway_id)
        known = self.gateways.get(gateway_id)
        if known is not None:
            if known.session is not None:
                known.session.close(Unavailable("a newer session of this gateway took over"))
            if known.incarnation != hello.incarnation:
                self._give_up(known, known.open)
                known = None
        gateway = known or Gateway(gateway_id, hello.incarnation, hello.peer)
        gateway.peer = hello.peer
        gateway.session = session
        self.gateways[gateway_id] = gateway
        _log.info("gateway_joined", gateway=gateway_id, incarnation=hello.incarnation)
        self._leader.greet_gateway(session)
        self._leader.gateways_changed()
        return gateway

    def _left(self, gateway: Gateway, session: GatewaySession) -> None:
        if gateway.session is session:
            gateway.session = None
            gateway.lost_s = time.monotonic()
            self._leader.gateways_changed()

    def _give_up(self, gateway: Gateway, numbers: Iterable[int]) -> None:
        now = now_ns()
        for number in list(numbers):
            self._end(gateway, number, RequestCancelled, now)

    def _handle(self, gateway: Gateway, messages: Iterable[scheduler_pb2.GatewayMessage]) -> None:
        now = now_ns()
        for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                self._submit(gateway, message.submit, now)
            elif kind == "finished":
                self._end(gateway, message.finished.request_id, RequestCompleted, now)
            elif kind == "cancel":
                self._end(gateway, message.cancel.request_id, RequestCancelled, now)
            elif kind == "delivery_failed":
                failed = message.delivery_failed
                event = converters.batch_failed(failed.batch_id, failed.failure)
                self._leader.feed(event, now)

    def _end(
        self,
        gateway: Gateway,
        number: int,
        kind: type[RequestCompleted] | type[RequestCancelled],
        now: Nanoseconds,
    ) -> None:
        request = RequestId(gateway.gateway_id, number)
        gateway.open.discard(number)
        self.sampled.pop(request, None)
        if not self._waiting.discard(request):
            self._leader.feed(kind(request), now)

    def _submit(
        self, gateway: Gateway, message: scheduler_pb2.SubmitRequest, now: Nanoseconds
    ) -> None:
        request = RequestId(gateway.gateway_id, message.request_id)
        gateway.open.add(message.request_id)
        if message.traceparent and is_sampled(message.traceparent):
            self.sampled[request] = Sampled(message.traceparent, time.time_ns())
        try:
            event = converters.request_arrived(gateway.gateway_id, message, now)
            self._admit(event, now)
        except CatenaryError as error:
            refusal = converters.rejection(
                request, error.reason, error.message, error.retry_after_ns
            )
            self.refuse(refusal, now)

    def _admit(self, event: RequestArrived, now: Nanoseconds) -> None:
        model = self._leader.resolve(*event.model)
        if model is None:
            raise ModelNotFound(f"model {event.model} is not deployed")
        if model != event.model:
            event = RequestArrived(
                event.request, model, event.rows, event.deadline_ns, event.priority, event.in_flight
            )
        # What a dispatcher holds already is resubmitted after a broken session: it compares.
        if self._leader.is_ready(model):
            self._leader.feed(event, now)
        else:
            self._waiting.add(event, now)
