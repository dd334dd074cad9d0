"""The Admin service: what gateways know is answered here, the rest by the scheduler that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, Protocol

import grpc.aio

from catenary_gateway.doors.grpc_calls import answered, metadata_of
from catenary_gateway.doors.security import on_behalf_of, passed_on
from catenary_gateway.observability.bookkeeping import Bookkeeping
from catenary_gateway.observability.local_answers import (
    LocalStatus,
    RunningRequests,
    add_attainment,
    name_requests,
    recent_requests,
)
from catenary_gateway.observability.waterfall import trace_of
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.security.keys import SCOPE_ADMIN, SCOPE_VIEW, ApiKeys

DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 600.0
"""Deployments and drains take minutes."""
VIEW_TIMEOUT_S = 1.5
"""To look takes a scheduler milliseconds; a person is told within two seconds that it does not."""
FROZEN_AFTER_S = 1.9
"""A scheduler sends heartbeats every second; one that has missed nearly two is taken as frozen."""
_LOOK_EVERY_S = 0.1
_VIEWS = frozenset({"GetStatus", "GetPlan", "ListSessions", "GetTimelines"})
"""What only looks."""
_RETRY_NS = 1_000_000_000

Context = grpc.aio.ServicerContext[Any, Any]


class HasChannel(Protocol):
    """What is needed of `SchedulerLink`."""

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """To the scheduler that leads; None while there is none."""
        ...

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Goes with every call."""
        ...

    @property
    def silent_s(self) -> float:
        """How long the scheduler that leads has said nothing."""
        ...

    @property
    def problems(self) -> Mapping[str, str]:
        """Why there is none, by address."""
        ...


class SchedulerAdmin:
    """Calls the Admin service of the scheduler that leads."""

    def __init__(self, link: HasChannel) -> None:
        self._link = link

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the scheduler's answer; with one group it does not matter which is named.

        Raises:
            Unavailable: no scheduler leads this gateway at present, or the one that does is frozen.
            grpc.aio.AioRpcError: what the scheduler answered.
        """
        channel = self._link.channel
        if channel is None:
            said = "; ".join(dict.fromkeys(self._link.problems.values()))
            text = f"no scheduler is connected{': ' if said else ''}{said}"
            raise Unavailable(text, retry_after_ns=_RETRY_NS)
        rpc = getattr(admin_pb2_grpc.AdminStub(channel), method)
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else min(timeout_s, LONGEST_TIMEOUT_S)
        looks_only = method in _VIEWS
        if looks_only:
            limit_s = min(limit_s, VIEW_TIMEOUT_S)
        answer = rpc(request, timeout=limit_s, metadata=passed_on(self._link.metadata))
        try:
            return await self._unless_frozen(answer)
        except grpc.aio.AioRpcError as error:
            if looks_only and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(
                    f"the scheduler has not answered within {limit_s:.1f} s",
                    retry_after_ns=_RETRY_NS,
                ) from error
            raise

    async def _unless_frozen(self, answer: Any) -> Any:
        """Waits for an answer as long as the scheduler is heard of at all."""
        waiting = asyncio.ensure_future(answer)
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S)
                if done:
                    return waiting.result()
                if self._link.silent_s > FROZEN_AFTER_S:
                    raise Unavailable(
                        f"the scheduler has said nothing for {self._link.silent_s:.1f} s; what was"
                        " asked of it may still happen",
                        retry_after_ns=_RETRY_NS,
                    )
        finally:
            waiting.cancel()

    def watch_scaling(
        self, request: admin_pb2.WatchScalingRequest
    ) -> AsyncIterable[admin_pb2.ScalingAdvice]:
        """Returns what the scheduler advises, until its stream ends.

        Raises:
            Unavailable: no scheduler leads this gateway at present.
        """
        channel = self._link.channel
        if channel is None:
            raise Unavailable("no scheduler is connected", retry_after_ns=_RETRY_NS)
        stub = admin_pb2_grpc.AdminStub(channel)
        return stub.WatchScaling(request, metadata=self._link.metadata or None)


class AdminService(admin_pb2_grpc.AdminServicer):
    """Needs the scope `admin` if keys are configured; to look only, `view` is enough."""

    def __init__(
        self,
        keys: ApiKeys,
        scheduler: SchedulerAdmin,
        books: Bookkeeping,
        requests: RunningRequests,
        known: LocalStatus,
    ) -> None:
        self._keys = keys
        self._scheduler = scheduler
        self._books = books
        self._requests = requests
        self._known = known

    @answered
    async def GetStatus(  # noqa: N802 - named by the protocol, like all below
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """The cluster as the scheduler sees it, and what became of requests to this gateway.

        While no scheduler answers it is what this gateway knows, with the reason.
        """
        self._authorize(context, SCOPE_VIEW)
        answer: admin_pb2.GetStatusResponse
        try:
            answer = await self._forward("GetStatus", request, context)
        except Unavailable as error:
            answer = self._known.status(error.message)
        add_attainment(answer, self._books.outcomes)
        return answer

    @answered
    async def GetPlan(  # noqa: N802
        self, request: admin_pb2.GetPlanRequest, context: Context
    ) -> admin_pb2.GetPlanResponse:
        """The active plan."""
        answer: admin_pb2.GetPlanResponse = await self._forward("GetPlan", request, context)
        return answer

    @answered
    async def ApplyPlan(  # noqa: N802
        self, request: admin_pb2.ApplyPlanRequest, context: Context
    ) -> admin_pb2.ApplyPlanResponse:
        """Replaces the plan."""
        answer: admin_pb2.ApplyPlanResponse = await self._forward("ApplyPlan", request, context)
        return answer

    @answered
    async def Replan(  # noqa: N802
        self, request: admin_pb2.ReplanRequest, context: Context
    ) -> admin_pb2.ReplanResponse:
        """Plans anew."""
        answer: admin_pb2.ReplanResponse = await self._forward("Replan", request, context)
        return answer

    @answered
    async def DeployModel(  # noqa: N802
        self, request: admin_pb2.DeployModelRequest, context: Context
    ) -> admin_pb2.DeployModelResponse:
        """Serves one more model."""
        answer: admin_pb2.DeployModelResponse = await self._forward("DeployModel", request, context)
        return answer

    @answered
    async def DrainAgent(  # noqa: N802
        self, request: admin_pb2.DrainAgentRequest, context: Context
    ) -> admin_pb2.DrainAgentResponse:
        """Empties an agent."""
        answer: admin_pb2.DrainAgentResponse = await self._forward("DrainAgent", request, context)
        return answer

    @answered
    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        """The sessions that generate; those of this gateway with the ids of their requests."""
        answer: admin_pb2.ListSessionsResponse = await self._forward(
            "ListSessions", request, context
        )
        name_requests(answer, self._books.gateway_id, self._requests)
        return answer

    @answered
    async def MoveSession(  # noqa: N802
        self, request: admin_pb2.MoveSessionRequest, context: Context
    ) -> admin_pb2.MoveSessionResponse:
        """Moves a session, which may be named by its request if this gateway serves that."""
        self._authorize(context)
        if bool(request.request_id) == bool(request.session_id):
            raise InvalidInput("session_id", "name either a session or a request")
        if request.request_id:
            running = self._requests.session_id(request.request_id)
            if running is None:
                raise InvalidInput("request_id", "does not generate text at this gateway")
            request.session_id = running
        answer: admin_pb2.MoveSessionResponse = await self._forward("MoveSession", request, context)
        return answer

    @answered
    async def GetTrace(  # noqa: N802
        self, request: admin_pb2.GetTraceRequest, context: Context
    ) -> admin_pb2.GetTraceResponse:
        """Where the time of one recent request of this gateway went."""
        self._authorize(context, SCOPE_VIEW)
        found = self._books.recent.find(request.request_id)
        if found is None:
            raise InvalidInput("request_id", "is not among the recent requests of this gateway")
        return trace_of(found, self._books.gateway_id)

    @answered
    async def GetTimelines(  # noqa: N802
        self, request: admin_pb2.GetTimelinesRequest, context: Context
    ) -> admin_pb2.GetTimelinesResponse:
        """For what each device and link is reserved, and how it was really used."""
        answer: admin_pb2.GetTimelinesResponse = await self._forward(
            "GetTimelines", request, context
        )
        return answer

    @answered
    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """The recent requests of this gateway, newest first."""
        self._authorize(context, SCOPE_VIEW)
        return recent_requests(self._books.recent, request.limit)

    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        """How many agents there should be, at once and whenever that changes."""
        try:
            self._authorize(context, SCOPE_VIEW)
            async for advice in self._scheduler.watch_scaling(request):
                yield advice
        except Exception as error:
            await abort(context, error_of_exception(error))
        await abort(context, Unavailable("the scheduler ended the stream"))

    async def _forward(self, method: str, request: Any, context: Context) -> Any:
        self._authorize(context, SCOPE_VIEW if method in _VIEWS else SCOPE_ADMIN)
        group = metadata_of(context).get(GROUP_METADATA)
        return await self._scheduler.call(method, request, context.time_remaining(), group)

    def _authorize(self, context: Context, scope: str = SCOPE_ADMIN) -> None:
        presented = metadata_of(context).get("authorization")
        on_behalf_of.set(presented or "")
        self._keys.check(presented).require(scope)
