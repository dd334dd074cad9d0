"""Prometheus metrics as typed attributes, and the HTTP server that exports them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from catenary_services.errors import Unavailable
from catenary_services.telemetry import names
from catenary_services.telemetry.names import MetricName

_MOST_SCRAPES = 32
_SCRAPE_SILENCE_S = 5.0
LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Bucket bounds in seconds, fine around the usual deadlines of vision models."""

GENERATION_BUCKETS = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds in seconds, as OpenTelemetry's conventions for generative AI advise."""

_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3, 1.5, 2.0, 4.0)
_MICRO_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 1e-1)
_ROW_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SWITCH_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SLO_WINDOW = 1_000


class _Attainment:
    """The recent requests of one model. Labels are looked up once, which is most of their cost."""

    def __init__(self, share: Gauge, met: Counter, missed: Counter) -> None:
        self._share, self._met, self._missed = share, met, missed
        self._window: deque[bool] = deque(maxlen=_SLO_WINDOW)
        self._count = 0

    def observe(self, met: bool) -> None:
        if len(self._window) == _SLO_WINDOW:
            self._count -= self._window[0]
        self._window.append(met)
        self._count += met
        (self._met if met else self._missed).inc()
        self._share.set(self._count / len(self._window))


class Metrics:
    """All metrics of gateways, schedulers and agents; each process uses its part.

    One registry holds one `Metrics`. On hot paths, look up labels once:
    `count = metrics.frames.labels("shm", "sent"); count.inc()`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._attainment: dict[str, _Attainment] = {}
        self._chains: set[tuple[str, str]] = set()
        self._scaled: set[str] = set()
        self._define_gateway()
        self._define_scheduler()
        self._define_leadership()
        self._define_device_failures()
        self._define_agent()
        self._define_repairs()
        self.frames_refused = self._counter(names.FRAMES_REFUSED)
        self.invalid_messages = self._counter(names.INVALID_MESSAGES)
        self.certificate_expiry = self._gauge(names.CERTIFICATE_EXPIRY)
        self.certificate_expiry.set(math.nan)  # 0 would look like a certificate that has expired

    def _define_gateway(self) -> None:
        self.requests = self._counter(names.REQUESTS)
        self.request_seconds = self._histogram(names.REQUEST_SECONDS, LATENCY_BUCKETS)
        self.requests_in_flight = self._gauge(names.REQUESTS_IN_FLIGHT)
        self.in_flight_bytes = self._gauge(names.IN_FLIGHT_BYTES)
        self.slo_attainment = self._gauge(names.SLO_ATTAINMENT)
        self.slo_requests = self._counter(names.SLO_REQUESTS)
        self.key_requests = self._counter(names.KEY_REQUESTS)
        self.quota_rejections = self._counter(names.QUOTA_REJECTIONS)
        self.unanswered_limit = self._gauge(names.UNANSWERED_LIMIT)
        self.redispatches = self._counter(names.REDISPATCHES)
        self.reroutes = self._counter(names.REROUTES)
        self._define_generation()

    def _define_generation(self) -> None:
        self.generation_seconds = self._histogram(
            names.GENERATIVE_AI_REQUEST_SECONDS, GENERATION_BUCKETS
        )
        self.first_token_seconds = self._histogram(
            names.GENERATIVE_AI_FIRST_TOKEN_SECONDS, FIRST_TOKEN_BUCKETS
        )
        self.token_seconds = self._histogram(names.GENERATIVE_AI_TOKEN_SECONDS, TOKEN_BUCKETS)
        self.inter_token_seconds = self._histogram(names.INTER_TOKEN_SECONDS, TOKEN_BUCKETS)
        self.token_objectives = self._counter(names.TOKEN_OBJECTIVES)
        self.prediction_ratio = self._histogram(names.PREDICTION_RATIO, _RATIO_BUCKETS)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.generation_tokens = self._counter(names.GENERATION_TOKENS)
        self.generations = self._counter(names.GENERATIONS)
        self.sessions_running = self._gauge(names.SESSIONS_RUNNING)
        self.sessions_waiting = self._gauge(names.SESSIONS_WAITING)
        self.generation_moves = self._counter(names.GENERATION_MOVES)
        self.move_stall_seconds = self._histogram(names.MOVE_STALL_SECONDS, TOKEN_BUCKETS)

    def _define_repairs(self) -> None:
        self.quarantined_records = self._counter(names.QUARANTINED_RECORDS)
        self.spoiled_epochs = self._counter(names.SPOILED_EPOCHS)
        self.takeover_failures = self._counter(names.TAKEOVER_FAILURES)
        self.quarantined_peers = self._counter(names.QUARANTINED_PEERS)

    def _define_device_failures(self) -> None:
        self.agents_stuck = self._counter(names.AGENTS_STUCK)
        self.circuits_opened = self._counter(names.CIRCUITS_OPENED)
        self.requests_to_blame = self._counter(names.REQUESTS_TO_BLAME)
        self.sessions_stalled = self._counter(names.SESSIONS_STALLED)

    def _define_scheduler(self) -> None:
        self.admission_rejected = self._counter(names.ADMISSION_REJECTED)
        self.queued_requests = self._gauge(names.QUEUED_REQUESTS)
        self.batches_in_flight = self._gauge(names.BATCHES_IN_FLIGHT)
        self.chain_capacity = self._gauge(names.CHAIN_CAPACITY)
        self.chain_in_flight = self._gauge(names.CHAIN_IN_FLIGHT)
        self.batch_rows = self._histogram(names.BATCH_ROWS, _ROW_BUCKETS)
        self.dispatch_seconds = self._histogram(names.DISPATCH_SECONDS, _MICRO_BUCKETS)
        self.live_reservations = self._gauge(names.LIVE_RESERVATIONS)
        self.book_audits = self._counter(names.BOOK_AUDITS)
        self.book_leaks = self._counter(names.BOOK_LEAKS)
        self.book_leaks_mended = self._counter(names.BOOK_LEAKS_MENDED)
        self.agent_slowdown = self._gauge(names.AGENT_SLOWDOWN)
        self.reservation_drift = self._counter(names.RESERVATION_DRIFT)
        self.reservation_corrections = self._counter(names.RESERVATION_CORRECTIONS)
        self.reservation_conflicts = self._counter(names.RESERVATION_CONFLICTS)
        self.latency_lines = self._gauge(names.LATENCY_LINES)
        self.prediction_error = self._gauge(names.PREDICTION_ERROR)
        self.prediction_error_max = self._gauge(names.PREDICTION_ERROR_MAX)
        self.link_rate = self._gauge(names.LINK_RATE)
        self.link_utilisation = self._gauge(names.LINK_UTILISATION)
        self.agents, self.impaired_agents = map(self._gauge, (names.AGENTS, names.IMPAIRED_AGENTS))
        self.agents_wanted = self._gauge(names.AGENTS_WANTED)
        self.agents_now = self._gauge(names.AGENTS_NOW)
        self.workers_wanted = self._gauge(names.WORKERS_WANTED)
        self.workers = self._gauge(names.WORKERS)
        self.session_rate = self._gauge(names.SESSION_RATE)
        self.session_attainment = self._gauge(names.SESSION_ATTAINMENT)
        self.placements = self._counter(names.PLACEMENTS)
        self.placement_theta = self._gauge(names.PLACEMENT_THETA)
        self.packing_moves = self._counter(names.PACKING_MOVES)
        self.packed_chains = self._gauge(names.PACKED_CHAINS)
        self.packed_chains_in_use = self._gauge(names.PACKED_CHAINS_IN_USE)
        self.migrations = self._counter(names.MIGRATIONS)
        self.migration_failures = self._counter(names.MIGRATION_FAILURES)
        self.migration_bytes = self._counter(names.MIGRATION_BYTES)
        self.migration_seconds = self._histogram(names.MIGRATION_SECONDS, LATENCY_BUCKETS)
        self.migration_held_seconds = self._histogram(names.MIGRATION_HELD_SECONDS, TOKEN_BUCKETS)
        self.sessions_moving = self._gauge(names.SESSIONS_MOVING)
        self.sessions_misplaced = self._gauge(names.SESSIONS_MISPLACED)

    def _define_leadership(self) -> None:
        self.gateways = self._gauge(names.GATEWAYS)
        self.leader = self._gauge(names.LEADER)
        self.epoch = self._gauge(names.EPOCH)
        self.plan_active = self._gauge(names.PLAN_ACTIVE, suffix="_info")
        self.plan_switches = self._counter(names.PLAN_SWITCHES)
        self.plan_switch_seconds = self._histogram(names.PLAN_SWITCH_SECONDS, _SWITCH_BUCKETS)
        self.plan_downtime = self._counter(names.PLAN_DOWNTIME)
        self.redis_connected = self._gauge(names.REDIS_CONNECTED)
        self.redis_pending = self._gauge(names.REDIS_PENDING)
        self.stragglers = self._gauge(names.STRAGGLERS)
        self.fragile_models = self._gauge(names.FRAGILE_MODELS)
        self.redis_failures = self._counter(names.REDIS_FAILURES)

    def _define_agent(self) -> None:
        self.batches = self._counter(names.BATCHES)
        self.stage_seconds = self._histogram(names.STAGE_SECONDS, LATENCY_BUCKETS)
        self.queued_batches = self._gauge(names.QUEUED_BATCHES)
        self.device_busy_seconds = self._counter(names.DEVICE_BUSY_SECONDS)
        self.partitions = self._gauge(names.PARTITIONS)
        self.partition_bytes = self._gauge(names.PARTITION_BYTES)
        self.orders_refused = self._counter(names.ORDERS_REFUSED)
        self.frames = self._counter(names.FRAMES)
        self.frame_bytes = self._counter(names.FRAME_BYTES)
        self.generation_step_seconds = self._histogram(
            names.GENERATION_STEP_SECONDS, LATENCY_BUCKETS
        )
        self.generation_rows = self._counter(names.GENERATION_ROWS)
        self.generation_sessions = self._gauge(names.GENERATION_SESSIONS)
        self.generation_sessions_ended = self._counter(names.GENERATION_SESSIONS_ENDED)
        self.cache_bytes = self._counter(names.CACHE_BYTES)
        self.handover_seconds = self._histogram(names.HANDOVER_SECONDS, LATENCY_BUCKETS)
        self.session_moves = self._counter(names.SESSION_MOVES)
        self.session_moves_failed = self._counter(names.SESSION_MOVES_FAILED)
        self.session_takeover_seconds = self._histogram(
            names.SESSION_TAKEOVER_SECONDS, LATENCY_BUCKETS
        )
        self.block_slots = self._gauge(names.BLOCK_SLOTS)
        self.block_slots_used = self._gauge(names.BLOCK_SLOTS_USED)

    def observe_slo(self, model: str, met: bool) -> None:
        """Counts one request with a deadline, and updates the share of those that met theirs."""
        attainment = self._attainment.get(model)
        if attainment is None:
            attainment = self._attainment[model] = _Attainment(
                self.slo_attainment.labels(model),
                self.slo_requests.labels(model, "true"),
                self.slo_requests.labels(model, "false"),
            )
        attainment.observe(met)

    def set_active_plan(self, plan_id: str) -> None:
        """Makes `plan_id` the only plan that is shown as active; "" for none."""
        self.plan_active.clear()
        if plan_id:
            self.plan_active.labels(plan_id).set(1)

    def keep_chains(self, chains: Set[tuple[str, str]]) -> None:
        """Removes the metrics of all chains except `chains`, given by model and number."""
        for gone in self._chains - chains:
            self.chain_capacity.remove(*gone)
            self.chain_in_flight.remove(*gone)
        self._chains = set(chains)

    def keep_scaled(self, models: Set[str]) -> None:
        """Removes the scaling metrics of all models except `models`."""
        gauges = (
            self.workers_wanted,
            self.workers,
            self.session_rate,
            self.session_attainment,
        )
        for gone in self._scaled - models:
            for gauge in gauges:
                gauge.remove(gone)
        self._scaled = set(models)

    def _counter(self, metric: MetricName) -> Counter:
        name = f"{metric.prefix}_{metric.name}"
        return Counter(name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: MetricName, suffix: str = "") -> Gauge:
        name = f"{metric.prefix}_{metric.name}{suffix}"
        return Gauge(name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: MetricName, buckets: Sequence[float]) -> Histogram:
        name = f"{metric.prefix}_{metric.name}"
        return Histogram(name, metric.help, metric.labels, buckets=buckets, registry=self.registry)


class _MetricsServer(ThreadingHTTPServer):
    """An HTTP server with a bounded number of connections; it closes those beyond."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection on a thread of its own, or closes it if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection, and then lets another take its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


def start_metrics_server(
    host: str, port: int, registry: CollectorRegistry
) -> tuple[int, Callable[[], None]]:
    """Serves `registry` at `http://host:port/metrics` on threads of its own.

    Returns:
        The port (for 0 a free one is chosen), and a function that stops the server.

    Raises:
        Unavailable: The address is in use or does not belong to this machine.
    """
    handler = type(
        "_Scrape",
        (prometheus_client.MetricsHandler,),
        {"registry": registry, "timeout": _SCRAPE_SILENCE_S},
    )
    try:
        server = _MetricsServer((host, port), handler)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)

    return int(server.server_port), stop
