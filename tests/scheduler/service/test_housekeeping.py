"""What a leader does because time passed goes on whatever one of its duties takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from catenary_scheduler.settings import SchedulerSettings
from scheduler_harness import Crowd, scheduler, until

Configured = Callable[..., SchedulerSettings]


async def test_heartbeats_go_on_while_a_large_model_is_read(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler(configured()) as process:
        gateway = await crowd.gateway(process.port)
        await until(lambda: gateway.all("welcome"), "it is welcome")
        began, read = asyncio.Event(), asyncio.Event()

        async def reads_for_long() -> bool:
            began.set()
            return await read.wait()

        deployments = process.leader().deployments
        monkeypatch.setattr(deployments, "retry", reads_for_long)
        deployments.problems["large"] = "is not there yet"
        await began.wait()
        heard = len(gateway.all("heartbeat"))
        await until(lambda: len(gateway.all("heartbeat")) > heard + 1, "heartbeats")
        read.set()


async def test_a_deployment_that_breaks_ends_no_term(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler(configured()) as process:
        gateway = await crowd.gateway(process.port)
        await until(lambda: gateway.all("welcome"), "it is welcome")
        tries = 0

        async def breaks() -> bool:
            nonlocal tries
            tries += 1
            raise ZeroDivisionError("nobody thought of this")

        leader = process.leader()
        monkeypatch.setattr(leader.deployments, "retry", breaks)
        leader.deployments.problems["odd"] = "cannot be read"
        await until(lambda: tries > 0, "it was tried")
        heard = len(gateway.all("heartbeat"))
        await until(lambda: len(gateway.all("heartbeat")) > heard, "a heartbeat")
        assert process.leader() is leader
