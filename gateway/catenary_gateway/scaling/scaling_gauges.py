"""The scheduler's advice on scaling as metrics of the gateway, where scrapers find them.

Autoscalers (KEDA, HPA) that use them need not know which scheduler leads. While no scheduler is
connected the last values stay, because its absence says nothing about the load.
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
    """A task that sets the gauges to the scheduler's advice."""

    def __init__(self, scheduler: SchedulerAdmin, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run(), name="scaling-gauges")

    async def close(self) -> None:
        """Stops following the advice. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def run(self) -> None:
        """Follows the advice until cancelled."""
        while True:
            try:
                request = admin_pb2.WatchScalingRequest()
                async for advice in self._scheduler.watch_scaling(request):
                    self.show(advice)
            except (CatenaryError, grpc.aio.AioRpcError) as error:
                # This is normal while schedulers change; the link logs when none is connected.
                _log.debug("scaling_stream_ended", error=str(error))
            await asyncio.sleep(_PAUSE_S)

    def show(self, advice: admin_pb2.ScalingAdvice) -> None:
        """Sets the gauges, and removes those of models that the advice no longer names."""
        metrics = self._metrics
        metrics.agents_wanted.set(advice.agents_wanted)
        metrics.agents_now.set(advice.agents_now)
        for model in advice.models:
            metrics.workers_wanted.labels(model.model).set(model.workers_wanted)
            metrics.workers.labels(model.model).set(model.workers_now)
            metrics.session_rate.labels(model.model).set(model.arrivals_per_s)
            metrics.session_attainment.labels(model.model).set(model.attainment_ratio)
        metrics.keep_scaled({model.model for model in advice.models})
