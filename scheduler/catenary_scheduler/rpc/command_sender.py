"""Carries out the dispatcher's commands by messages on the streams of gateways and agents."""

from __future__ import annotations

import time

from prometheus_client import Histogram

from catenary_scheduler.agents.registry import AgentSender
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch.events import (
    CancelBatch,
    CloseSessions,
    Command,
    DispatchBatch,
    ExtendWindow,
    GrantWindow,
    Reject,
    RevokeWindow,
    StartSession,
    WindowOver,
)
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.rpc.gateway_registry import GatewayRegistry
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.wire import messages as wire_messages
from catenary_scheduler.wire import session_messages, window_messages
from catenary_services.domain.ids import ModelKey, Nanoseconds, RequestId
from catenary_services.telemetry import names
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer, parse_traceparent


class CommandSender:
    """Turns commands into messages for the gateways and agents they concern."""

    def __init__(
        self,
        gateways: GatewayRegistry,
        agents: AgentSender,
        in_flight: tuple[InFlightBatches, LiveSessions, Timelines],
        telemetry: tuple[Metrics, Tracer],
        lease: Lease,
        cluster: ClusterController,
    ) -> None:
        """Sends with the epoch of `lease`, and the id of the plan that is active in `cluster`."""
        self._gateways = gateways
        self._agents = agents
        self._in_flight, self._live, self._timelines = in_flight
        self._metrics, self._tracer = telemetry
        self._lease = lease
        self._cluster = cluster
        self._batch_rows: dict[ModelKey, Histogram] = {}

    def route(self, command: Command, now: Nanoseconds) -> None:
        """Sends the messages of a command, and records it in books and metrics."""
        if isinstance(command, DispatchBatch):
            self._dispatch(command, now)
        elif isinstance(command, Reject):
            self._metrics.admission_rejected.labels(command.reason).inc()
            self._gateways.refuse(command, now)
        elif isinstance(command, CancelBatch):
            self._in_flight.over(command.batch)
            cancel = wire_messages.cancel_batches_message([command.batch], self._lease.epoch)
            for agent in command.agents:
                self._agents.send(agent, cancel)
        elif isinstance(command, GrantWindow):
            epoch, plan_id = self._lease.epoch, self._cluster.plan_id
            grant = window_messages.grant_message(command, epoch, plan_id, now)
            self._gateways.send(command.gateway, grant)
            self._in_flight.dispatched(command.whole())
            self._timelines.granted(command)
        elif isinstance(command, ExtendWindow):
            self._gateways.send(command.gateway, window_messages.extend_message(command, now))
            extended = self._timelines.extended(command)
            if extended is not None:
                self._in_flight.extended(extended.whole())
        elif isinstance(command, RevokeWindow):
            self._gateways.send(command.gateway, window_messages.revoke_message(command))
        elif isinstance(command, WindowOver):
            self._in_flight.over(command.window)
        elif isinstance(command, StartSession):
            self._start(command)
        elif isinstance(command, CloseSessions):
            close = session_messages.close_sessions_message(command.sessions, self._lease.epoch)
            self._agents.send(command.agent, close)

    def _start(self, command: StartSession) -> None:
        message = session_messages.start_session_message(
            command, self._lease.epoch, self._cluster.plan_id
        )
        self._gateways.send(command.request.gateway, message)
        self._live.started(command)
        if command.request in self._gateways.sampled:
            self._record_span(
                command.request,
                command.hops[0].partition.model,
                {
                    names.ATTRIBUTE_SESSION_ID: command.session,
                    names.ATTRIBUTE_CHAIN_ID: command.chain_id,
                },
            )

    def _dispatch(self, command: DispatchBatch, now: Nanoseconds) -> None:
        sampled = self._gateways.sampled
        traceparents: dict[RequestId, str] = {}
        if sampled:
            traceparents = {
                piece.request: sampled[piece.request].traceparent
                for piece in command.slices
                if piece.request in sampled
            }
        messages = wire_messages.dispatch_messages(
            command, self._lease.epoch, self._cluster.plan_id, traceparents, now
        )
        for gateway, message in messages.items():
            self._gateways.send(gateway, message)
        self._in_flight.dispatched(command)
        self._timelines.dispatched(command, now)
        self._observe(command)
        for request in traceparents:
            self._record_span(
                request,
                command.path[0].partition.model,
                {
                    names.ATTRIBUTE_BATCH_ID: command.batch,
                    names.ATTRIBUTE_BATCH_ROWS: command.rows,
                },
            )

    def _observe(self, command: DispatchBatch) -> None:
        model = command.path[0].partition.model
        histogram = self._batch_rows.get(model)
        if histogram is None:
            histogram = self._batch_rows[model] = self._metrics.batch_rows.labels(model.name)
        histogram.observe(command.rows)

    def _record_span(
        self, request: RequestId, model: ModelKey, attributes: dict[str, str | int]
    ) -> None:
        sampled = self._gateways.sampled[request]
        parent = parse_traceparent(sampled.traceparent)
        if parent is None:
            return
        self._tracer.record(
            context=parent.child(),
            parent_span_id=parent.span_id,
            name=names.SPAN_SCHEDULE,
            start_unix_ns=sampled.arrived_unix_ns,
            end_unix_ns=time.time_ns(),
            attributes={
                names.ATTRIBUTE_MODEL: model.name,
                names.ATTRIBUTE_MODEL_VERSION: model.version,
                **attributes,
            },
        )
