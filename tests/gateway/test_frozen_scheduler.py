"""What an operator is told when the scheduler that leads stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from catenary_gateway.endpoints.admin import FROZEN_AFTER_S, VIEW_TIMEOUT_S, SchedulerAdmin
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.errors import Unavailable
from shared_helpers.grpc_servers import connected

TOLD_WITHIN_S = 2.0


class Standing(admin_pb2_grpc.AdminServicer):
    """Takes every call and answers none."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.set()
        await asyncio.sleep(60)

    ApplyPlan = GetPlan = GetStatus

    async def WatchScaling(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield admin_pb2.ScalingAdvice(agents_wanted=2)
        await asyncio.sleep(60)


class Link:
    metadata: tuple[tuple[str, str], ...] = ()
    problems: Mapping[str, str] = {}

    def __init__(self, channel: grpc.aio.Channel, heard_ago_s: float | None) -> None:
        self.channel: grpc.aio.Channel | None = channel
        self._heard_s = None if heard_ago_s is None else time.monotonic() - heard_ago_s

    @property
    def silent_s(self) -> float:
        return 0.0 if self._heard_s is None else time.monotonic() - self._heard_s


@asynccontextmanager
async def admin(*, heard_ago_s: float | None) -> AsyncIterator[SchedulerAdmin]:
    async with connected(admin_pb2_grpc.add_AdminServicer_to_server, Standing()) as channel:
        yield SchedulerAdmin(Link(channel, heard_ago_s))


async def test_to_look_takes_no_longer_than_its_limit_though_heartbeats_come() -> None:
    async with admin(heard_ago_s=None) as scheduler:
        with pytest.raises(Unavailable, match="not answered within"):
            await scheduler.call("GetPlan", admin_pb2.GetPlanRequest(), None)
    assert VIEW_TIMEOUT_S < TOLD_WITHIN_S


async def test_a_change_is_given_up_when_heartbeats_stop_and_not_before() -> None:
    async with admin(heard_ago_s=0.0) as scheduler:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="may still happen"):
            await scheduler.call("ApplyPlan", admin_pb2.ApplyPlanRequest(plan_json="{}"), 60.0)
        assert time.monotonic() - began >= FROZEN_AFTER_S
    assert FROZEN_AFTER_S < TOLD_WITHIN_S


async def test_a_change_asked_of_a_scheduler_that_was_silent_before_is_refused_at_once() -> None:
    async with admin(heard_ago_s=10.0) as scheduler:
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match="said nothing for"):
                await scheduler.call("ApplyPlan", admin_pb2.ApplyPlanRequest(), 60.0)


async def test_whoever_waits_is_told_when_the_link_closes_its_channel_with_the_stream() -> None:
    standing = Standing()
    async with connected(admin_pb2_grpc.add_AdminServicer_to_server, standing) as channel:
        scheduler = SchedulerAdmin(Link(channel, heard_ago_s=None))
        request = admin_pb2.ApplyPlanRequest(plan_json="{}")
        asking = asyncio.ensure_future(scheduler.call("ApplyPlan", request, 60.0))
        await standing.asked.wait()
        await channel.close()
        with pytest.raises(Unavailable, match="connection to the scheduler is gone"):
            await asking


async def test_advice_on_scaling_ends_with_an_error_when_the_link_closes_its_channel() -> None:
    async with connected(admin_pb2_grpc.add_AdminServicer_to_server, Standing()) as channel:
        scheduler = SchedulerAdmin(Link(channel, heard_ago_s=None))
        advice = scheduler.watch_scaling(admin_pb2.WatchScalingRequest())
        assert (await anext(advice)).agents_wanted == 2
        more = asyncio.ensure_future(anext(advice))
        await asyncio.sleep(0)  # until it waits
        await channel.close()
        with pytest.raises(Unavailable, match="connection to the scheduler is gone"):
            await more
