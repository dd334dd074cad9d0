"""KEDA's `externalscaler.ExternalScaler`: the scheduler decides how many agents run.

One `ScaledObject` scales one StatefulSet of agents, which the trigger's metadata names. The metric
is the number of replicas itself (target 1 per replica, type AverageValue), so that KEDA and the
horizontal pod autoscaler compute exactly the number that the scheduler wants.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

from catenary_gateway.endpoints.grpc_calls import answered, metadata_of
from catenary_gateway.scaling.replicas import StatefulSetShare, replicas_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_protos.externalscaler import externalscaler_pb2 as keda
from catenary_protos.externalscaler import externalscaler_pb2_grpc as keda_grpc
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.security.keys import SCOPE_VIEW, ApiKeys

METRIC = "catenary-agents"
_ANSWER_S = 5.0
"""Seconds to wait for the scheduler; KEDA asks again at its next poll."""
_RETRY_NS = 1_000_000_000
_KEY_NAMES = ("apiKey", "apiKeyFromEnv")
"""Names of the trigger's metadata that may hold an API key, because KEDA sends no metadata with its
calls. KEDA takes the value of a name that ends in "FromEnv" from the environment of the scaled pods
and keeps the name."""

Context = grpc.aio.ServicerContext[Any, Any]


class ScalingSource(Protocol):
    """The part of `SchedulerAdmin` that scaling uses."""

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the scheduler's answer."""
        ...

    def watch_scaling(
        self, request: admin_pb2.WatchScalingRequest
    ) -> AsyncGenerator[admin_pb2.ScalingAdvice, None]:
        """Yields the scheduler's advice, until the scheduler ends the stream."""
        ...


class ExternalScaler(keda_grpc.ExternalScalerServicer):
    """KEDA's external scaler.

    If keys are configured, its calls need one with the scope `view` or `admin`.
    """

    def __init__(self, keys: ApiKeys, scheduler: ScalingSource) -> None:
        self._keys = keys
        self._scheduler = scheduler

    @answered
    async def IsActive(  # noqa: N802 - named by the protocol, like all below
        self, request: keda.ScaledObjectRef, context: Context
    ) -> keda.IsActiveResponse:
        """Returns whether there should be any replica."""
        return keda.IsActiveResponse(result=await self._replicas(request, context) > 0)

    async def StreamIsActive(  # noqa: N802
        self, request: keda.ScaledObjectRef, context: Context
    ) -> AsyncIterator[keda.IsActiveResponse]:
        """Streams whether there should be any replica: at once, and whenever it changes."""
        told: bool | None = None
        try:
            share = self._admit(request, context)
            async for advice in self._scheduler.watch_scaling(admin_pb2.WatchScalingRequest()):
                is_active = replicas_of(share, advice, await self._agents()) > 0
                if is_active != told:
                    told = is_active
                    yield keda.IsActiveResponse(result=is_active)
        except Exception as error:
            await abort(context, error_of_exception(error))
        await abort(context, Unavailable("the scheduler ended the stream"))

    @answered
    async def GetMetricSpec(  # noqa: N802
        self, request: keda.ScaledObjectRef, context: Context
    ) -> keda.GetMetricSpecResponse:
        """Returns the only metric: the number of replicas, with a target of 1 per replica."""
        self._admit(request, context)
        spec = keda.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    @answered
    async def GetMetrics(  # noqa: N802
        self, request: keda.GetMetricsRequest, context: Context
    ) -> keda.GetMetricsResponse:
        """Returns the number of replicas that there should be now."""
        if request.metricName not in ("", METRIC):
            raise InvalidInput("metricName", f"there is only {METRIC!r}")
        replicas = await self._replicas(request.scaledObjectRef, context)
        value = keda.MetricValue(
            metricName=METRIC, metricValue=replicas, metricValueFloat=float(replicas)
        )
        return keda.GetMetricsResponse(metricValues=[value])

    async def _replicas(self, reference: keda.ScaledObjectRef, context: Context) -> int:
        share = self._admit(reference, context)
        # Agents are read after the advice. An agent that joins in between counts twice until the
        # next poll. An agent that leaves in between is never taken for one that must stay.
        try:
            async with asyncio.timeout(_ANSWER_S):
                advice = await self._advice()
                agents = await self._agents()
        except TimeoutError:
            raise Unavailable("the scheduler did not answer", retry_after_ns=_RETRY_NS) from None
        return replicas_of(share, advice, agents)

    async def _advice(self) -> admin_pb2.ScalingAdvice:
        request = admin_pb2.WatchScalingRequest()
        async with aclosing(self._scheduler.watch_scaling(request)) as stream:
            async for advice in stream:
                return advice
        raise Unavailable("the scheduler ended the stream", retry_after_ns=_RETRY_NS)

    async def _agents(self) -> list[admin_pb2.AgentStatus]:
        request = admin_pb2.GetStatusRequest()
        answer: admin_pb2.GetStatusResponse = await self._scheduler.call(
            "GetStatus", request, _ANSWER_S
        )
        return list(answer.agents)

    def _admit(self, reference: keda.ScaledObjectRef, context: Context) -> StatefulSetShare:
        """Checks the key of a call, and returns the agents that it is for.

        Raises:
            Unauthenticated: Keys are configured and none of them came with the call.
            PermissionDenied: The key does not have the scope `view`.
            InvalidInput: The trigger's metadata are wrong.
        """
        metadata = reference.scalerMetadata
        presented = metadata_of(context).get("authorization")
        for name in _KEY_NAMES:
            presented = presented or metadata.get(name)
        self._keys.check(presented).require(SCOPE_VIEW)
        return share_of(metadata)


def share_of(metadata: Mapping[str, str]) -> StatefulSetShare:
    """Returns the agents that a trigger scales, from its metadata.

    Raises:
        InvalidInput: `agentPrefix` is missing, or `growthShare` is not a number in 0..1.
    """
    prefix = metadata.get("agentPrefix", "")
    if not prefix:
        raise InvalidInput(
            "scalerMetadata.agentPrefix", "is missing: the StatefulSet's name and a hyphen"
        )
    try:
        growth = float(json.loads(metadata.get("growthShare", "1")))
    except (TypeError, ValueError):
        growth = -1.0
    if not 0.0 <= growth <= 1.0:
        raise InvalidInput("scalerMetadata.growthShare", "must be a number in 0..1")
    return StatefulSetShare(prefix, growth)
