"""The gateway process: it builds all parts, starts them in order, and stops them in reverse."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from catenary_gateway.admission.authorizer import Authorizer
from catenary_gateway.admission.concurrency_limiter import ConcurrencyLimiter
from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.admission.readiness import Readiness
from catenary_gateway.admission.request_pipeline import RequestArrivals, RequestPipeline
from catenary_gateway.catalog import Catalog
from catenary_gateway.class_names import ClassNames
from catenary_gateway.dashboard.api import Dashboard
from catenary_gateway.data_plane import DataPlane
from catenary_gateway.endpoints.admin import AdminService
from catenary_gateway.endpoints.generation_grpc import GenerationService
from catenary_gateway.endpoints.grpc_calls import (
    KeyAuthorizer,
    admin_longest,
    inference_call_policy,
)
from catenary_gateway.endpoints.repository import Repository
from catenary_gateway.endpoints.security import admin_security, endpoint_security
from catenary_gateway.fairness.fair_limiter import FairLimiters
from catenary_gateway.generation.plane import GenerationIntervals, SessionPlane
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_gateway.groups.schedulers import SchedulerLinks
from catenary_gateway.http_server import HttpServer
from catenary_gateway.observability.local_answers import LocalStatus
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_gateway.oip.extensions import ProtocolExtensions
from catenary_gateway.oip.oip_grpc import BUFFER_PARSERS, InferenceService
from catenary_gateway.oip.shared_regions import SharedRegions
from catenary_gateway.scaling.external_scaler import ExternalScaler
from catenary_gateway.scaling.scaling_gauges import ScalingGauges
from catenary_gateway.scheduler_listener import MessageRouter
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    frame_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from catenary_protos.externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import Unavailable
from catenary_services.grpc.grpc_kit import (
    HealthSwitch,
    bind,
    create_server,
    enable_health_and_reflection,
)
from catenary_services.grpc.probes import Probes
from catenary_services.grpc.server.call_policy import CallPolicy
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.log import get_logger
from catenary_services.security.identity import Role
from catenary_services.security.keys import ApiKeys
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.store.settings import store_settings
from catenary_services.store.store import ModelStore
from catenary_services.telemetry.metrics import Metrics, start_metrics_server
from catenary_services.telemetry.tracing import Tracer
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSecurity, TransportSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_STOP_GRACE_S = 1.0
_MESSAGE_SLACK_BYTES = 64 * 1024
"""Room in a message for names, shapes and parameters beside the largest request's tensors."""
_RETRY_NS = 1_000_000_000

_log = get_logger("catenary_gateway.process")


class GatewayProcess:
    """One gateway, as a `catenary_services.lifecycle.Process`."""

    def __init__(self, settings: GatewaySettings, *, exporter: SpanExporter | None = None) -> None:
        self.settings = settings
        self.name = settings.gateway_id
        client_security = ClientSecurity.from_settings(settings)
        self._certificate = OwnCertificate(settings, Role.GATEWAY, settings.gateway_id)
        self._metrics = Metrics()
        self._tracer = Tracer(
            "catenary-gateway",
            self.name,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
            exporter=exporter,
        )
        self._hub = TransportHub(
            self.name,
            _transport_settings(settings),
            lambda why: self._metrics.frames_refused.labels(why).inc(),
        )
        self._keys = ApiKeys.load(settings.api_keys_file)
        self._catalog = Catalog()
        self._readiness = Readiness(self._catalog, settings.unavailable_grace_s)
        self._schedulers = SchedulerLinks(settings, client_security, self._metrics)
        outbox, scheduler_admin = self._schedulers.outbox, self._schedulers.admin
        request_metrics = RequestMetrics(self.name, self._metrics, self._tracer)
        self._plane = DataPlane(self._catalog, outbox, self._hub, request_metrics)
        self._sessions = SessionPlane(
            self.name,
            outbox,
            self._hub,
            request_metrics,
            self._plane.numbers,
            GenerationIntervals(
                int(settings.progress_interval_s * 1e9), int(settings.generation_silence_s * 1e9)
            ),
        )
        self._plane.results.others[frame_pb2.FRAME_KIND_SESSION_TOKENS] = self._sessions.tokens
        self._capacity = ConcurrencyLimiter(
            settings.max_in_flight_bytes,
            settings.max_in_flight_requests,
            settings.max_request_bytes,
        )
        self._codecs = TextCodecs(
            settings.model_repository, special_from_content=settings.special_tokens_in_chats
        )
        self._codecs.prepare = self._prepare_model
        self._model_store = ModelStore(self._codecs.repository, self._hub, store_settings(settings))
        self._model_store.fetched = self._metrics.fetched_bytes.inc
        for kind in self._model_store.frame_kinds:
            self._plane.results.keepers[kind] = self._model_store.on_frame
        self._authorizer = Authorizer(
            Quotas(faults_per_s=settings.bad_requests_per_s),
            FairLimiters(enabled=settings.fair_share),
            self._metrics,
            int(settings.max_first_token_wait_s * 1e9),
        )
        self._pipeline = RequestPipeline(
            self.name,
            RequestArrivals(self.name, self._tracer, settings.max_request_bytes),
            self._keys,
            self._capacity,
            self._authorizer,
            self._catalog,
            self._readiness,
            self._plane,
            self._sessions,
            self._codecs,
            min(settings.max_prompt_bytes, settings.max_request_bytes),
        )
        class_names = ClassNames(self._catalog, self._codecs)
        self._regions = SharedRegions(
            settings.shared_memory_prefix, settings.max_shared_memory_bytes
        )
        self._extensions = ProtocolExtensions(
            self._pipeline,
            Repository(self._catalog, scheduler_admin),
            self._regions,
            self._tracer,
            class_names,
            is_open=settings.insecure,
        )
        known = LocalStatus(self.name, self._catalog)
        self._admin_service = AdminService(
            self._keys, scheduler_admin, request_metrics, self._sessions, known
        )
        dashboard = None
        if settings.dashboard:
            is_open = settings.insecure or settings.endpoints_insecure
            dashboard = Dashboard(self._pipeline, scheduler_admin, class_names, is_open=is_open)
        self._http = HttpServer(settings, self._pipeline, self._extensions, dashboard)
        self._servers: list[GrpcServer] = []
        self._health: list[HealthSwitch] = []
        self._scaler = ExternalScaler(self._keys, scheduler_admin)
        self._probes = Probes()
        self.health_port: int | None = None
        self._gauges = ScalingGauges(scheduler_admin, self._metrics)
        self._stop_metrics = _nothing
        self._keys_watch: asyncio.Task[None] | None = None
        self.grpc_port = self.http_port = self.admin_port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Opens every endpoint and begins to look for the scheduler, without waiting for it.

        Raises:
            Unavailable: A port is in use.
        """
        settings = self.settings
        self._model_store.start()
        await self._hub.start(self._plane.results.take)
        self._certificate.start(self._metrics)
        self._watch_load()
        self._pipeline.arrivals.lag.start()
        self._keys_watch = asyncio.create_task(
            self._authorizer.watch(self._keys, self._regions.keep_owners)
        )
        if settings.health_port is not None:
            self.health_port = await self._probes.start(settings.health_host, settings.health_port)
        if settings.metrics_port is not None:
            self.metrics_port, self._stop_metrics = start_metrics_server(
                settings.metrics_host, settings.metrics_port, self._metrics.registry
            )
            self._gauges.start()
        await self._open_inference()
        await self._open_admin()
        tls = endpoint_security(settings).ssl_context()
        self.http_port = await self._http.start(settings.host, settings.http_port, tls)
        self._readiness.watch = self._switch_health
        self._readiness.reconnected = self._authorizer.fair.interrupted
        planes = (self._plane, self._sessions)
        listener = MessageRouter(
            self.name, planes, self._catalog, self._codecs, self._readiness, self._hub
        )
        listener.told_gateways = self._authorizer.quotas.divide
        self._schedulers.start(listener, planes)
        _log.info("endpoints_open", grpc=self.grpc_port, http=self.http_port, admin=self.admin_port)

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until a scheduler leads this gateway and every model is ready.

        Raises:
            Unavailable: The gateway was not ready within `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._readiness.wait()
        except TimeoutError:
            why = self._readiness.why_not
            raise Unavailable(f"not ready within {timeout_s:g} s: {why}") from None

    async def failed(self) -> None:
        """Waits for the links to schedulers, and raises if one of them ends, which none should."""
        await self._schedulers.failed()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, and waits until all others are answered or the time is up."""
        self._readiness.drain()
        self._model_store.leave()
        self._capacity.draining = True
        idle = await asyncio.gather(self._plane.idle(timeout_s), self._sessions.idle(timeout_s))
        if not all(idle):
            _log.warning("drain_incomplete", unanswered=self._unanswered)

    async def stop(self) -> None:
        """Ends every unanswered request with an error, and closes all connections."""
        self._readiness.drain()
        self._capacity.draining = True
        self._pipeline.arrivals.lag.stop()
        if self._keys_watch is not None:
            self._keys_watch.cancel()
            await asyncio.gather(self._keys_watch, return_exceptions=True)
        stopped = Unavailable("the gateway stopped", retry_after_ns=_RETRY_NS)
        await self._plane.close(stopped)
        await self._sessions.close(stopped)
        await self._probes.stop()
        for health in self._health:
            await health.shutdown()
        await asyncio.gather(*(server.stop(_STOP_GRACE_S) for server in self._servers))
        self._servers.clear()  # their last references must go while this event loop runs
        await self._http.stop()
        await self._schedulers.stop()
        await self._codecs.close()
        await self._model_store.close()
        await self._hub.close()
        await self._certificate.close()
        await asyncio.to_thread(self._tracer.shutdown)
        await self._gauges.close()
        await asyncio.to_thread(self._stop_metrics)

    async def _open_inference(self) -> None:
        settings = self.settings
        security = endpoint_security(settings)
        limit = settings.max_request_bytes + _MESSAGE_SLACK_BYTES
        call_policy = inference_call_policy(
            self._pipeline,
            _MESSAGE_SLACK_BYTES,
            max(settings.max_in_flight_bytes, limit),
            BUFFER_PARSERS,
        )
        server = create_server(security, call_policy=call_policy, max_message_bytes=limit)
        service = InferenceService(self._pipeline, self._extensions, settings.max_stream_requests)
        generation = GenerationService(self._pipeline)
        server.add(service, oip_grpc.add_GRPCInferenceServiceServicer_to_server)
        server.add(generation, generation_pb2_grpc.add_GenerationServicer_to_server)
        described = (
            oip.DESCRIPTOR.services_by_name["GRPCInferenceService"],
            generation_pb2.DESCRIPTOR.services_by_name["Generation"],
        )
        self._health.append(enable_health_and_reflection(server, described))
        self._servers.append(server)
        self.grpc_port = bind(server, settings.host, settings.grpc_port, security)
        await server.start()

    async def _open_admin(self) -> None:
        settings = self.settings
        security, authorizer = admin_security(settings, has_keys=self._keys.enabled)
        # Without API keys, `authorizer` identifies operators by their certificates.
        call_authorizer = KeyAuthorizer(self._pipeline) if authorizer is None else None
        call_policy = CallPolicy(call_authorizer, admin_longest())
        server = create_server(security, authorizer=authorizer, call_policy=call_policy)
        server.add(self._admin_service, admin_pb2_grpc.add_AdminServicer_to_server)
        server.add(self._scaler, externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server)
        described = (
            admin_pb2.DESCRIPTOR.services_by_name["Admin"],
            externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"],
        )
        self._health.append(enable_health_and_reflection(server, described))
        self._servers.append(server)
        self.admin_port = bind(server, settings.host, settings.admin_port, security)
        await server.start()

    def _prepare_model(self, key: ModelKey) -> None:
        """Sees to it that the files of a model can be read; called on the thread that reads."""
        served = self._catalog.at(key)
        if served is not None:
            others = [name for name in served.sources if name != self.name]
            self._model_store.prepare(key, served.content_digest, others)

    @property
    def _unanswered(self) -> int:
        return self._plane.unanswered + self._sessions.unanswered

    def _watch_load(self) -> None:
        metrics, sessions = self._metrics, self._sessions
        metrics.requests_in_flight.set_function(lambda: float(self._unanswered))
        metrics.in_flight_bytes.set_function(lambda: float(self._capacity.bytes))
        metrics.sessions_running.set_function(lambda: float(sessions.running))
        metrics.sessions_waiting.set_function(lambda: float(sessions.unanswered - sessions.running))

    def _switch_health(self, ready: bool) -> None:
        for health in self._health:
            health.set_serving(ready)
        self._probes.set_ready(ready)
        _log.info("ready" if ready else "not_ready")


def _transport_settings(settings: GatewaySettings) -> TransportSettings:
    return TransportSettings(
        enabled=tuple(settings.transports),
        host=settings.transport_host,
        advertise_host=settings.advertise_host,
        tcp_port=settings.transport_port,
        runtime_dir=settings.runtime_dir,
        security=TransportSecurity(
            server=ServerSecurity.from_settings(settings),
            client=ClientSecurity.from_settings(settings),
        ),
    )


def _nothing() -> None:
    return None
