"""What the scheduler says of scaling, as metrics of the gateway: the one place scrapers find it.

Whoever scales by these figures (KEDA, HPA) need not know which scheduler leads. While none is
connected the last figures stay: load has not changed because nobody could be asked.
"""

from __future__ import annotations

import asyncio

import grpc.aio

from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_PAUSE_S = 2.0
_log = get_logger("catenary_gateway.scaling.scaling_gauges")


class ScalingGauges:
    """Keeps the gauges at the scheduler's advice."""

    def __init__(self, scheduler: SchedulerAdmin, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow the advice."""
        self._task = asyncio.create_task(self.run(), name="scaling-gauges")

    async def close(self) -> None:
        """Ends that. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                request = admin_pb2.WatchScalingRequest()
                async for advice in self._scheduler.watch_scaling(request):
                    self.show(advice)
            except (CatenaryError, grpc.aio.AioRpcError) as error:
                # Normal while schedulers change; the link itself tells when none is there.
                _log.debug("scaling_stream_ended", error=str(error))
            await asyncio.sleep(_PAUSE_S)

    def show(self, advice: admin_pb2.ScalingAdvice) -> None:
        """Sets the gauges; those of models that are gone are removed."""
        metrics = self._metrics
        metrics.agents_wanted.set(advice.agents_wanted)
        metrics.agents_now.set(advice.agents_now)
        for model in advice.models:
            metrics.workers_wanted.labels(model.model).set(model.workers_wanted)
            metrics.workers.labels(model.model).set(model.workers_now)
            metrics.session_rate.labels(model.model).set(model.arrivals_per_s)
            metrics.session_attainment.labels(model.model).set(model.attainment_ratio)
        metrics.keep_scaled({model.model for model in advice.models})
