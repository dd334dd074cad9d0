"""A gateway passes on what its scheduler advises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc.aio
import pytest

from catenary_gateway.endpoints.admin import AdminService, SchedulerAdmin
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.security.keys import ApiKeys, add_key
from shared_helpers.grpc_servers import connected

ADD = admin_pb2_grpc.add_AdminServicer_to_server


class Scheduler(admin_pb2_grpc.AdminServicer):
    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: object
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        for wanted in (1, 2):
            yield admin_pb2.ScalingAdvice(agents_wanted=wanted)


class Link:
    """To a scheduler that may not be there."""

    metadata: tuple[tuple[str, str], ...] = ()
    problems: ClassVar[dict[str, str]] = {}
    channel: grpc.aio.Channel | None = None
    silent_s = 0.0


@asynccontextmanager
async def gateway(*, keys: ApiKeys, is_led: bool = True) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        link = Link()
        if is_led:
            link.channel = await stack.enter_async_context(connected(ADD, Scheduler()))
        nobody = cast(Any, None)
        request_metrics = cast(RequestMetrics, None)
        service = AdminService(keys, SchedulerAdmin(link), request_metrics, nobody, nobody)
        channel = await stack.enter_async_context(connected(ADD, service))
        yield admin_pb2_grpc.AdminStub(channel)


async def said_by(stub: Any, metadata: Any = None) -> tuple[list[int], grpc.aio.AioRpcError]:
    """Returns the agents wanted, in order, and how the stream ended."""
    heard: list[int] = []
    try:
        async for advice in stub.WatchScaling(
            admin_pb2.WatchScalingRequest(), metadata=metadata, timeout=5
        ):
            heard.append(advice.agents_wanted)
    except grpc.aio.AioRpcError as error:
        return heard, error
    raise AssertionError("a stream of advice never ends well")


async def test_advice_is_passed_on_until_the_scheduler_ends_it() -> None:
    async with gateway(keys=ApiKeys.load(None)) as stub:
        heard, error = await said_by(stub)
    assert heard == [1, 2]
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_scheduler_it_says_so_at_once() -> None:
    async with gateway(keys=ApiKeys.load(None), is_led=False) as stub:
        heard, error = await said_by(stub)
    assert (heard, error.code()) == ([], grpc.StatusCode.UNAVAILABLE)
    assert "no scheduler" in (error.details() or "")


@pytest.mark.parametrize(
    ("scopes", "code"),
    [(("admin",), grpc.StatusCode.UNAVAILABLE), (("infer",), grpc.StatusCode.PERMISSION_DENIED)],
)
async def test_a_key_needs_the_scope_admin(
    tmp_path: Path, scopes: tuple[str, ...], code: grpc.StatusCode
) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "operator", scopes)
    async with gateway(keys=ApiKeys.load(file)) as stub:
        _, error = await said_by(stub, (("authorization", f"Bearer {key}"),))
        assert error.code() is code
        _, error = await said_by(stub)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_only_operators_see_and_move_sessions(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "customer", ("infer",))
    metadata = (("authorization", f"Bearer {key}"),)
    async with gateway(keys=ApiKeys.load(file)) as stub:
        for call, request in (
            (stub.ListSessions, admin_pb2.ListSessionsRequest()),
            (stub.MoveSession, admin_pb2.MoveSessionRequest(request_id="of another")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(request, metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
