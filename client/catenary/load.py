"""A load generator: closed loop (a number of callers) or open loop (Poisson arrivals).

In the open loop a request's latency counts from the moment it was due, so that a server that stalls
cannot hide it by making the generator late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from catenary import errors
from catenary.async_client import AsyncClient
from catenary.errors import CatenaryError, InvalidInputError
from catenary.types import InferRequest

MOST_OUTSTANDING = 4096
NOT_SENT = "NOT_SENT"
"""Key in `errors` of arrivals beyond `MOST_OUTSTANDING`, which are not sent. They count as late:
the server has that many to answer."""
CLIENT_REASONS = frozenset(
    kind.reason
    for kind in (
        errors.InvalidInputError,
        errors.PayloadTooLargeError,
        errors.ModelNotFoundError,
        errors.NotSupportedError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.RequestCancelledError,
        errors.QuotaExceededError,
    )
)
"""Reasons for which the client has itself to thank; such requests count for no share. Gateways
count in the same way (`catenary_arrivals_total`)."""
REFUSAL_REASONS = frozenset(
    kind.reason
    for kind in (
        errors.OverloadedError,
        errors.CacheFullError,
        errors.SloUnattainableError,
        errors.UnavailableError,
        errors.NoActivePlanError,
        errors.PlanInfeasibleError,
        errors.ContentMismatchError,
        errors.CanaryFailedError,
    )
)
"""Reasons for which a request is turned away: no room, or nobody to serve it. All others are of
requests that were accepted, and count as late."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The load to generate.

    Attributes:
        seconds: Seconds during which requests are started.
        rate: Arrivals a second; None for the closed loop.
        concurrency: Callers of the closed loop, each waiting for its answer.
        timeout_s: gRPC deadline of each request; None for none.
        slo_ms: SLO against which attainment is measured; also sent with each request.
        seed: Seed of the arrival times.
    """

    seconds: float
    rate: float | None = None
    concurrency: int = 1
    timeout_s: float | None = None
    slo_ms: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise InvalidInputError.at("seconds", "must be positive")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise InvalidInputError.at("rate", "must be positive")
        if not 1 <= self.concurrency <= MOST_OUTSTANDING:
            raise InvalidInputError.at("concurrency", f"must be in 1..{MOST_OUTSTANDING}")


@dataclass(slots=True)
class LoadReport:
    """The result of a load; latencies in milliseconds, of answered requests."""

    latencies_ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    slo_ms: float | None = None

    @property
    def requests(self) -> int:
        """Number of requests begun."""
        return len(self.latencies_ms) + self.errors.total()

    @property
    def good(self) -> int:
        """Number of requests answered within the SLO; without an SLO, of those answered."""
        slo_ms = self.slo_ms
        if slo_ms is None:
            return len(self.latencies_ms)
        return sum(latency <= slo_ms for latency in self.latencies_ms)

    @property
    def refused(self) -> int:
        """Number of requests that were turned away."""
        return sum(self.errors[reason] for reason in REFUSAL_REASONS)

    @property
    def client(self) -> int:
        """Number of requests that failed because of their client, which is this one."""
        return sum(self.errors[reason] for reason in CLIENT_REASONS)

    @property
    def late(self) -> int:
        """Number of requests that were accepted, and answered too late or not at all."""
        return self.requests - self.good - self.refused - self.client

    @property
    def attainment(self) -> float | None:
        """Share of the requests answered within the SLO, of all but those wrong in themselves.

        None without an SLO.
        """
        arrived = self.good + self.late + self.refused
        return self.good / arrived if self.slo_ms is not None and arrived else None

    def percentile_ms(self, percent: float) -> float | None:
        """Returns the nearest-rank percentile of the latencies; None if nothing was answered."""
        if not self.latencies_ms:
            return None
        ordered = sorted(self.latencies_ms)
        return ordered[max(0, -int(-percent * len(ordered) // 100) - 1)]

    def facts(self) -> dict[str, object]:
        """Returns the report as plain values."""
        return {
            "requests": self.requests,
            "answered": len(self.latencies_ms),
            "rate_rps": len(self.latencies_ms) / self.elapsed_s if self.elapsed_s else 0.0,
            "elapsed_s": self.elapsed_s,
            "p50_ms": self.percentile_ms(50),
            "p90_ms": self.percentile_ms(90),
            "p99_ms": self.percentile_ms(99),
            "max_ms": self.percentile_ms(100),
            "good": self.good,
            "late": self.late,
            "refused": self.refused,
            "client": self.client,
            "errors": dict(self.errors.most_common()),
            "slo_ms": self.slo_ms,
            "attainment": self.attainment,
        }


async def run_load(
    client: AsyncClient,
    request: InferRequest,
    settings: LoadSettings,
    progress: Callable[[LoadReport], None] = lambda report: None,
) -> LoadReport:
    """Sends copies of a request as the settings say, and returns a report of their answers.

    Args:
        client: The client to send with.
        request: The request to send; each copy gets an id of its own.
        settings: The load to generate.
        progress: Called with the growing report after each answer.
    """
    run = _Run(client, request, settings, progress)
    started = time.monotonic()
    await (run.closed_loop() if settings.rate is None else run.open_loop(settings.rate))
    run.report.elapsed_s = time.monotonic() - started
    return run.report


class _Run:
    def __init__(
        self,
        client: AsyncClient,
        request: InferRequest,
        settings: LoadSettings,
        progress: Callable[[LoadReport], None],
    ) -> None:
        self._client = client
        self._request = request
        self._settings = settings
        self._progress = progress
        self.report = LoadReport(slo_ms=settings.slo_ms)

    async def closed_loop(self) -> None:
        end = time.monotonic() + self._settings.seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.concurrency):
                group.create_task(self._call_until(end))

    async def open_loop(self, rate: float) -> None:
        draw = random.Random(self._settings.seed)
        due = start = time.monotonic()
        outstanding: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while (due := due + draw.expovariate(rate)) < start + self._settings.seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if len(outstanding) >= MOST_OUTSTANDING:
                    self.report.errors[NOT_SENT] += 1
                    continue
                task = group.create_task(self._call(due))
                outstanding.add(task)
                task.add_done_callback(outstanding.discard)

    async def _call_until(self, end: float) -> None:
        while (now := time.monotonic()) < end:
            await self._call(now)

    async def _call(self, due: float) -> None:
        try:
            await self._client.send(self._request, timeout_s=self._settings.timeout_s)
        except CatenaryError as error:
            self.report.errors[error.reason] += 1
        else:
            self.report.latencies_ms.append((time.monotonic() - due) * 1e3)
        self._progress(self.report)
