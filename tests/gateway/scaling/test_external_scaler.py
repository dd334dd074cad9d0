"""KEDA asks the gateway, over real gRPC, how many replicas a StatefulSet should have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar

import grpc.aio
import pytest

from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_gateway.scaling.external_scaler import METRIC, ExternalScaler
from catenary_gateway.scaling.replicas import StatefulSetShare, replicas_of
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_protos.externalscaler import externalscaler_pb2 as keda
from catenary_protos.externalscaler import externalscaler_pb2_grpc as keda_grpc
from catenary_services.security.keys import ApiKeys, add_key
from shared_helpers.grpc_servers import connected

Advice = admin_pb2.ScalingAdvice


class Scheduler(admin_pb2_grpc.AdminServicer):
    """Advises one thing after another, and knows the agents it is told."""

    def __init__(self, *advices: Advice, agents: int = 2) -> None:
        self.advices = advices
        self.agents = [f"cat-agent-l4-{n}" for n in range(agents)]
        self.more = asyncio.Event()

    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: object
    ) -> AsyncIterator[Advice]:
        for advice in self.advices:
            yield advice
            await self.more.wait()

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: object
    ) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(agents=agents_of(*self.agents))


class Link:
    metadata: tuple[tuple[str, str], ...] = ()
    problems: ClassVar[dict[str, str]] = {}

    def __init__(self, channel: grpc.aio.Channel | None) -> None:
        self.channel = channel


@asynccontextmanager
async def scaler(
    scheduler: Scheduler | None, keys: ApiKeys | None = None
) -> AsyncIterator[keda_grpc.ExternalScalerStub]:
    async with AsyncExitStack() as stack:
        behind = None
        if scheduler is not None:
            add = admin_pb2_grpc.add_AdminServicer_to_server
            behind = await stack.enter_async_context(connected(add, scheduler))
        service = ExternalScaler(keys or ApiKeys.load(None), SchedulerAdmin(Link(behind)))
        add = keda_grpc.add_ExternalScalerServicer_to_server
        yield keda_grpc.ExternalScalerStub(await stack.enter_async_context(connected(add, service)))


def agents_of(*names: str, **states: str) -> list[admin_pb2.AgentStatus]:
    return [
        admin_pb2.AgentStatus(agent_id=name, state=states.get(name[-1:], "ready")) for name in names
    ]


def about(**metadata: str) -> keda.ScaledObjectRef:
    known = {"scalerAddress": "x:8003", "agentPrefix": "cat-agent-l4-"}
    return keda.ScaledObjectRef(
        name="cat-agent-l4", namespace="prod", scalerMetadata=known | metadata
    )


def metrics(reference: keda.ScaledObjectRef) -> keda.GetMetricsRequest:
    return keda.GetMetricsRequest(scaledObjectRef=reference, metricName=METRIC)


async def test_keda_is_told_the_replicas_themselves() -> None:
    async with scaler(Scheduler(Advice(agents_wanted=5, agents_now=2))) as stub:
        spec = (await stub.GetMetricSpec(about())).metricSpecs[0]
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC, 1, 1.0)
        value = (await stub.GetMetrics(metrics(about()))).metricValues[0]
        assert (value.metricName, value.metricValue, value.metricValueFloat) == (METRIC, 5, 5.0)
        assert (await stub.IsActive(about())).result is True


async def test_whether_it_is_active_is_pushed_once_and_when_it_changes() -> None:
    scheduler = Scheduler(
        Advice(agents_wanted=0), Advice(agents_wanted=0), Advice(agents_wanted=2), agents=0
    )
    scheduler.more.set()
    heard = []
    async with scaler(scheduler) as stub:
        call = stub.StreamIsActive(about(), timeout=5)
        for _ in range(2):
            heard.append((await call.read()).result)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert heard == [False, True]


async def test_keda_falls_back_where_its_newest_call_is_not_known() -> None:
    async with scaler(Scheduler(Advice())) as stub:
        assert not hasattr(stub, "StreamMetricSpec")


async def test_without_a_scheduler_it_says_so() -> None:
    async with scaler(None) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetMetrics(metrics(about()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("reference", "field"),
    [
        (keda.ScaledObjectRef(), "agentPrefix"),
        (about(growthShare="much"), "growthShare"),
        (about(growthShare="1.5"), "growthShare"),
    ],
)
async def test_metadata_that_say_nothing_are_refused(
    reference: keda.ScaledObjectRef, field: str
) -> None:
    async with scaler(Scheduler(Advice())) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetMetrics(metrics(reference))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


async def test_an_unknown_metric_is_refused() -> None:
    async with scaler(Scheduler(Advice())) as stub:
        request = keda.GetMetricsRequest(scaledObjectRef=about(), metricName="cpu")
        assert await stub.GetMetrics(request).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("scopes", "name", "code"),
    [
        (("view",), "apiKey", grpc.StatusCode.OK),
        (("view",), "apiKeyFromEnv", grpc.StatusCode.OK),
        (("admin",), "apiKey", grpc.StatusCode.OK),
        (("infer",), "apiKey", grpc.StatusCode.PERMISSION_DENIED),
        (("view",), "", grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_with_keys_the_trigger_brings_one(
    tmp_path: Path, scopes: tuple[str, ...], name: str, code: grpc.StatusCode
) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "keda", scopes)
    reference = about(**({name: key} if name else {}))
    async with scaler(Scheduler(Advice(agents_wanted=2)), ApiKeys.load(file)) as stub:
        calls = (
            stub.GetMetrics(metrics(reference)),
            stub.IsActive(reference),
            stub.GetMetricSpec(reference),
        )
        for call in calls:
            assert await call.code() is code


# ---- how many ----


L4 = StatefulSetShare("cat-agent-l4-", 1.0)


def replicas(
    wanted: int,
    now: int,
    names: list[str],
    share: StatefulSetShare = L4,
    drains: bool = True,
    **retiring: bool,
) -> int:
    advice = Advice(agents_wanted=wanted, agents_now=now, drains_agents=drains)
    for number, drained in retiring.items():
        advice.retiring.add(agent_id=f"cat-agent-l4-{number[1:]}", drained=drained)
    return replicas_of(share, advice, agents_of(*names))


def named(*ordinals: int) -> list[str]:
    return [f"cat-agent-l4-{n}" for n in ordinals]


def test_what_is_missing_is_added() -> None:
    assert replicas(5, 3, named(0, 1, 2)) == 5
    assert replicas(3, 0, []) == 3
    assert replicas(3, 3, named(0, 1, 2)) == 3


def test_an_agent_on_its_way_out_counts_until_it_is_empty() -> None:
    assert replicas(2, 2, named(0, 1, 2), _2=False) == 3
    assert replicas(2, 2, named(0, 1, 2), _2=True) == 2


def test_one_that_can_be_taken_back_is_not_started_anew() -> None:
    assert replicas(3, 2, named(0, 1, 2), _2=False) == 3


def test_an_empty_agent_below_others_keeps_its_replica() -> None:
    """Kubernetes would take away the highest, which works."""
    assert replicas(2, 2, named(0, 1, 2), _1=True) == 3


def test_an_agent_that_restarts_is_no_reason_for_another() -> None:
    assert replicas(3, 2, named(0, 2)) == 3
    assert replicas(3, 2, named(0, 1)) == 3
    lost = Advice(agents_wanted=3, agents_now=2, drains_agents=True)
    assert replicas_of(L4, lost, agents_of(*named(0, 1, 2), **{"2": "lost"})) == 3


def test_whoever_is_too_many_stays_until_the_scheduler_has_drained_it() -> None:
    assert replicas(1, 3, named(0, 1, 2)) == 3
    assert replicas(1, 3, named(0, 1, 2), drains=False) == 1


def test_growth_is_shared_between_statefulsets() -> None:
    names = [*named(0, 1), "cat-agent-a100-0", "agent-7", "cat-agent-l4-x"]
    assert replicas(9, 5, names, StatefulSetShare("cat-agent-l4-", 0.5)) == 4
    assert replicas(9, 5, names, StatefulSetShare("cat-agent-a100-", 0.5)) == 3
    assert replicas(9, 5, names, StatefulSetShare("cat-agent-a100-", 0.0)) == 1
