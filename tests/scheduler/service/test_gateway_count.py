"""Gateways are told how many they are, so that each gives API keys its part of their rates."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.settings import SchedulerSettings
from scheduler_harness import Crowd, FakeGateway, scheduler, until

Configured = Callable[..., SchedulerSettings]


def told(gateway: FakeGateway) -> int:
    directories = gateway.all("directory")
    return directories[-1].gateways if directories else 0


async def test_every_gateway_hears_how_many_there_are(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured()) as process:
        first = await crowd.gateway(process.port, "gateway-0")
        await until(lambda: told(first) == 1, "the first is alone")
        second = await crowd.gateway(process.port, "gateway-1")
        await until(lambda: told(first) == told(second) == 2, "both know of each other")
