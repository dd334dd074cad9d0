"""A gateway's metrics show what its scheduler advises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_gateway.scaling import scaling_gauges
from catenary_gateway.scaling.scaling_gauges import ScalingGauges
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import Unavailable
from catenary_services.telemetry.metrics import Metrics


def advice(**workers: int) -> admin_pb2.ScalingAdvice:
    models = [
        admin_pb2.ModelScaling(
            model=name,
            workers_wanted=wanted,
            workers_now=1,
            arrivals_per_s=2.5,
            attainment_ratio=0.75,
        )
        for name, wanted in workers.items()
    ]
    return admin_pb2.ScalingAdvice(agents_wanted=3, agents_now=2, models=models)


class Scheduler(SchedulerAdmin):
    """Advises twice, and is not to be reached in between."""

    def __init__(self) -> None:
        self.streams = [[advice(one=2, two=5)], None, [advice(one=4)]]
        self.told = asyncio.Event()

    async def watch_scaling(
        self, request: admin_pb2.WatchScalingRequest
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        stream = self.streams.pop(0) if self.streams else None
        if stream is None:
            raise Unavailable("no scheduler is connected")
        for each in stream:
            yield each
        if not self.streams:
            self.told.set()


async def test_the_gauges_follow_the_advice_over_the_loss_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling_gauges, "_PAUSE_S", 0.001)
    metrics, scheduler = Metrics(), Scheduler()
    gauges = ScalingGauges(scheduler, metrics)
    gauges.start()
    async with asyncio.timeout(30):
        await scheduler.told.wait()
    await gauges.close()
    value = metrics.registry.get_sample_value
    assert value("catenary_agents_wanted") == 3.0
    assert value("catenary_agents_present") == 2.0
    one = {"model": "one"}
    assert value("catenary_workers_wanted", one) == 4.0
    assert value("catenary_workers", one) == 1.0
    assert value("catenary_session_arrivals_per_second", one) == 2.5
    assert value("catenary_session_attainment_ratio", one) == 0.75
    assert value("catenary_workers_wanted", {"model": "two"}) is None  # it is gone


async def test_gauges_that_never_started_can_be_closed() -> None:
    await ScalingGauges(Scheduler(), Metrics()).close()
