"""The streams of the gateways: requests come in, dispatches and refusals go out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    Event,
    RequestCancelled,
    RequestCompleted,
    SessionRequested,
)
from catenary_scheduler.inflight.not_ready_queue import Arrival, NotReadyQueue
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.rpc.announcer import Announcer
from catenary_scheduler.rpc.gateway_registry import (
    GatewayRegistry,
    GatewayState,
    GatewayStream,
    SampledRequest,
)
from catenary_scheduler.rpc.plausibility import PlausibilityChecks
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire import messages as wire_messages
from catenary_scheduler.wire import session_messages, window_messages
from catenary_scheduler.wire.streams import Speaks, first_pack, read_pack
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    BatchId,
    GatewayId,
    ModelKey,
    Nanoseconds,
    RequestId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.errors import CatenaryError, InvalidInput, ModelNotFound, Unavailable
from catenary_services.errors import RequestCancelled as CallerGone
from catenary_services.log import get_logger
from catenary_services.telemetry.tracing import is_sampled

_log = get_logger(__name__)


class GatewayAudit(Protocol):
    """The part of a leader that audits the requests that gateways wait for."""

    def gateway_says(self, gateway: GatewayId, message: scheduler_pb2.Unanswered) -> None:
        """Takes in a gateway's answer to an audit."""
        ...

    def gone(self, who: GatewayId) -> None:
        """Forgets the answers of a gateway that restarted or connected again."""
        ...


class KnownSessions(Protocol):
    """The part of a leader that knows sessions that generate text."""

    def objectives(self, model: ModelKey) -> TokenObjectives | None:
        """Returns the objectives of requests of a model that name none; None without any."""
        ...

    def adopted(self, message: scheduler_pb2.SubmitSession) -> AdoptedSession | None:
        """Returns the session that a request names as generating for it already, else None."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayStreamDeps:
    """The parts of a leader that gateways' streams ask, and that hear of requests."""

    registry: GatewayRegistry
    announcer: Announcer
    plausibility: PlausibilityChecks
    cluster: ClusterController
    deployments: Deployments
    timelines: Timelines
    waiting: NotReadyQueue
    audits: GatewayAudit
    sessions: KnownSessions
    feed: Callable[[Event, Nanoseconds], None]
    silence_s: float
    """Seconds after which a silent stream ends, and a gateway without a stream counts as lost."""


class GatewayStreams:
    """The streams of all gateways of one term."""

    def __init__(self, deps: GatewayStreamDeps) -> None:
        self._deps = deps
        self._registry = deps.registry
        self._feed = deps.feed
        self._handlers: dict[str, Callable[[GatewayState, Any, Nanoseconds], None]] = {
            "submit": self._submit,
            "submit_session": self._submit_session,
            "sessions_progressed": lambda gateway, said, now: self._feed(
                session_messages.sessions_progressed(gateway.gateway_id, said), now
            ),
            "finished": self._finished,
            "cancel": self._cancelled,
            "delivery_failed": self._delivery_failed,
            "unanswered": self._unanswered,
            "window_report": self._window_reported,
            "session_failed": lambda _, said, now: self._feed(
                session_messages.session_failed(said.session_id, said.failure, None), now
            ),
        }

    def begin(self, session: GatewayStream, data: bytes, speaks: Speaks) -> None:
        """Takes in the first pack of a gateway's stream, and has the others taken in.

        Args:
            session: The stream.
            data: The bytes of the pack.
            speaks: Is called with the name in the hello; raises if the peer may not use that name.

        Raises:
            CatenaryError: The stream is refused; the error says why.
        """
        pack = first_pack(scheduler_pb2.GatewayMessages, data, "a gateway")
        hello = pack.messages[0].hello
        speaks(hello.gateway_id)
        gateway = self._joined(hello, session)

        def handle(data: bytes) -> None:
            self._handle(gateway, read_pack(scheduler_pb2.GatewayMessages, data).messages)

        session.handle = handle
        session.left = lambda: self._left(gateway, session)
        self._handle(gateway, pack.messages[1:])

    def tick(self, now: Nanoseconds) -> None:
        """Ends silent streams, and gives up the requests of gateways that stayed away."""
        now_s, silence_s = now / NANOSECONDS_PER_SECOND, self._deps.silence_s
        for gateway in list(self._registry.gateways.values()):
            session = gateway.session
            if session is not None:
                if now_s - session.heard_s > silence_s:
                    session.close(Unavailable(f"nothing was heard for {silence_s} s"))
            elif now_s - gateway.lost_s > silence_s:
                _log.warning("gateway_lost", gateway=gateway.gateway_id, open=len(gateway.open))
                self._give_up(gateway, gateway.open)
                del self._registry.gateways[gateway.gateway_id]
                self._deps.announcer.gateways_changed()

    def _joined(self, hello: scheduler_pb2.GatewayHello, session: GatewayStream) -> GatewayState:
        gateway_id = GatewayId(hello.gateway_id)
        known = self._registry.gateways.get(gateway_id)
        if known is not None:
            if known.session is not None:
                known.session.close(Unavailable("a newer session of this gateway took over"))
            if known.incarnation != hello.incarnation:
                self._give_up(known, known.open)
                known = None
        gateway = known or GatewayState(gateway_id, hello.incarnation, hello.peer)
        gateway.peer = hello.peer
        gateway.software_version = hello.software_version
        gateway.takes_windows = hello.takes_windows
        gateway.session = session
        self._registry.gateways[gateway_id] = gateway
        _log.info("gateway_joined", gateway=gateway_id, incarnation=hello.incarnation)
        self._deps.audits.gone(gateway_id)
        self._deps.announcer.greet_gateway(session)
        self._deps.announcer.gateways_changed()
        return gateway

    def _left(self, gateway: GatewayState, session: GatewayStream) -> None:
        if gateway.session is session:
            gateway.session = None
            gateway.lost_s = time.monotonic()
            self._deps.announcer.gateways_changed()

    def _give_up(self, gateway: GatewayState, numbers: Iterable[int]) -> None:
        now = now_ns()
        for number in list(numbers):
            self._end(gateway, RequestCancelled(RequestId(gateway.gateway_id, number)), now)

    def _handle(
        self, gateway: GatewayState, messages: Iterable[scheduler_pb2.GatewayMessage]
    ) -> None:
        now = now_ns()
        for message in messages:
            kind = message.WhichOneof("kind") or ""
            handle = self._handlers.get(kind)
            if handle is None:
                continue  # a heartbeat, or a message of a newer release
            said = getattr(message, kind)
            if self._deps.plausibility.believes_gateway(gateway.gateway_id, kind, said):
                handle(gateway, said, now)

    def _finished(
        self, gateway: GatewayState, said: scheduler_pb2.RequestFinished, now: Nanoseconds
    ) -> None:
        self._end(gateway, wire_messages.request_completed(gateway.gateway_id, said), now)

    def _cancelled(
        self, gateway: GatewayState, said: scheduler_pb2.CancelRequest, now: Nanoseconds
    ) -> None:
        request = RequestId(gateway.gateway_id, said.request_id)
        self._end(gateway, RequestCancelled(request), now)

    def _delivery_failed(
        self, gateway: GatewayState, failed: scheduler_pb2.DeliveryFailed, now: Nanoseconds
    ) -> None:
        """Ends a batch that could not be delivered.

        If the gateway no longer waits for the rows, its requests are given up, not run again.
        """
        event = wire_messages.batch_failed(failed.batch_id, failed.failure)
        if event.reason == CallerGone.reason:
            entry = self._deps.timelines.entry(event.batch)  # None if it is forgotten
            requests = [piece.request for piece in entry.command.slices] if entry else ()
            gone = [
                each.number
                for each in dict.fromkeys(requests)
                if each.gateway == gateway.gateway_id
            ]
            self._give_up(gateway, gateway.open.intersection(gone))
        self._feed(event, now)

    def _window_reported(
        self, gateway: GatewayState, said: scheduler_pb2.WindowReport, now: Nanoseconds
    ) -> None:
        """Takes in what a gateway has sent by a window; a window that is forgotten is over."""
        grant = self._deps.timelines.window(BatchId(said.window_id))
        if grant is not None:
            self._feed(window_messages.window_reported(grant, said), now)

    def _unanswered(
        self, gateway: GatewayState, message: scheduler_pb2.Unanswered, now: Nanoseconds
    ) -> None:
        """Takes in the requests that a gateway waits for: its answer to an audit, or unasked.

        A gateway says so unasked when it has come back, since it could not report requests that
        ended while it was away. They are given up.
        """
        if message.number:
            self._deps.audits.gateway_says(gateway.gateway_id, message)
        else:
            self._give_up(gateway, gateway.open.difference(r.request_id for r in message.requests))

    def _end(
        self, gateway: GatewayState, event: RequestCompleted | RequestCancelled, now: Nanoseconds
    ) -> None:
        request = event.request
        gateway.open.discard(request.number)
        self._registry.sampled.pop(request, None)
        if request in self._deps.waiting.requests:
            self._deps.waiting.remove(request)
        else:
            self._feed(event, now)

    def _submit(
        self, gateway: GatewayState, message: scheduler_pb2.SubmitRequest, now: Nanoseconds
    ) -> None:
        try:
            self._enter(gateway, message.request_id, message.traceparent)
            model = self._deployed(message.model, message.model_version, generates=False)
            units = self._deps.deployments.ready[model].table.units
            name, windows = gateway.gateway_id, gateway.takes_windows
            event = wire_messages.request_arrived(name, message, model, now, units, windows)
            self._admit(event, now)
        except CatenaryError as error:
            self._refuse(gateway, message.request_id, error, now)

    def _submit_session(
        self, gateway: GatewayState, message: scheduler_pb2.SubmitSession, now: Nanoseconds
    ) -> None:
        try:
            self._enter(gateway, message.request_id, message.traceparent)
            model = self._deployed(message.model, message.model_version, generates=True)
            message.model_version = model.version
            adopted = self._deps.sessions.adopted(message)
            usual = self._deps.sessions.objectives(model)
            self._admit(
                session_messages.session_requested(
                    gateway.gateway_id, message, now, adopted, usual
                ),
                now,
            )
        except CatenaryError as error:
            self._refuse(gateway, message.request_id, error, now)

    def _enter(self, gateway: GatewayState, number: int, traceparent: str) -> None:
        """Notes a request as open, and as traced if it is."""
        gateway.open.add(number)
        if traceparent and is_sampled(traceparent):
            request = RequestId(gateway.gateway_id, number)
            self._registry.sampled[request] = SampledRequest(traceparent, time.time_ns())

    def _refuse(
        self, gateway: GatewayState, number: int, error: CatenaryError, now: Nanoseconds
    ) -> None:
        request = RequestId(gateway.gateway_id, number)
        refusal = wire_messages.rejection(
            request, error.reason, error.message, error.retry_after_ns
        )
        self._registry.refuse(refusal, now)

    def _deployed(self, name: str, version: str, *, generates: bool) -> ModelKey:
        """Returns the deployed model that a request names.

        Raises:
            ModelNotFound: There is none.
            InvalidInput: It does something else than the request asks for.
        """
        deployments = self._deps.deployments
        model = deployments.resolve(name, version)
        if model is None:
            raise ModelNotFound(f"model {ModelKey(name, version)} is not deployed")
        if (deployments.ready[model].decoder is not None) != generates:
            kind = "does not generate text" if generates else "generates text, it does not infer"
            raise InvalidInput("model", f"{model} {kind}")
        return model

    def _admit(self, event: Arrival, now: Nanoseconds) -> None:
        # After a broken stream a gateway resubmits requests that the dispatcher may hold already;
        # the dispatcher compares. A session that goes on does not need a ready model.
        goes_on = isinstance(event, SessionRequested) and event.in_flight is not None
        if goes_on or self._deps.cluster.is_ready(event.model):
            self._feed(event, now)
        else:
            self._deps.waiting.add(event, now)
