"""The metrics of one process, and the HTTP server that exports them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Set
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from catenary_services.errors import Unavailable
from catenary_services.telemetry import names
from catenary_services.telemetry.metric_table import MetricTable

_MOST_SCRAPES = 32
_SCRAPE_SILENCE_S = 5.0
_SLO_WINDOW = 1_000


class _Attainment:
    """The recent requests of one model. Labels are looked up once, which is most of their cost."""

    def __init__(self, share: Gauge, met: Counter, missed: Counter) -> None:
        self._met, self._missed = met, missed
        self._window: deque[bool] = deque(maxlen=_SLO_WINDOW)
        self._count = 0
        share.set_function(self._share_met)

    def observe(self, met: bool) -> None:
        if len(self._window) == _SLO_WINDOW:
            self._count -= self._window[0]
        self._window.append(met)
        self._count += met
        (self._met if met else self._missed).inc()

    def _share_met(self) -> float:
        window = len(self._window)
        return self._count / window if window else 0.0


class Metrics(MetricTable):
    """All metrics of gateways, schedulers and agents; each process uses its part.

    One registry holds one `Metrics`. On hot paths, look up labels once:
    `count = metrics.frames.labels("shm", "sent"); count.inc()`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        super().__init__(self.registry)
        self._attainment: dict[str, _Attainment] = {}
        self._arrivals: dict[tuple[str, str], Counter] = {}
        self._chains: set[tuple[str, str]] = set()
        self._scaled: set[str] = set()
        self.certificate_expiry.set(math.nan)  # 0 would look like a certificate that has expired

    def observe_arrival(self, model: str, kind: str) -> None:
        """Counts one request by what became of it, and updates the share of those in time.

        Args:
            model: The model's label; empty if it was not known yet.
            kind: A value of the label `kind`.
        """
        arrived = self._arrivals.get((model, kind))
        if arrived is None:
            arrived = self._arrivals[model, kind] = self.arrivals.labels(model, kind)
        arrived.inc()
        if kind == names.CLIENT or not model:
            return
        attainment = self._attainment.get(model)
        if attainment is None:
            attainment = self._attainment[model] = _Attainment(
                self.slo_attainment.labels(model),
                self.slo_requests.labels(model, "true"),
                self.slo_requests.labels(model, "false"),
            )
        attainment.observe(kind == names.GOOD)

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
