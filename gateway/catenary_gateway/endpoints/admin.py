"""The Admin service: it answers from the gateway's own facts, or asks the scheduler that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc.aio

from catenary_gateway.endpoints.grpc_calls import answered, metadata_of
from catenary_gateway.endpoints.security import on_behalf_of, passed_on
from catenary_gateway.observability.local_answers import (
    LocalStatus,
    RunningRequests,
    add_attainment,
    name_requests,
    name_story,
    recent_requests,
)
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_gateway.observability.waterfall import trace_of
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.security.keys import SCOPE_ADMIN, SCOPE_VIEW, ApiKeys

DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 600.0
"""Longest time in seconds for a call of the Admin service; deployments and drains take minutes."""
VIEW_TIMEOUT_S = 1.5
"""Seconds to wait for calls that only look. They take a scheduler milliseconds; a person is told
within two seconds if it does not answer."""
FROZEN_AFTER_S = 1.9
"""Seconds of silence after which a scheduler counts as frozen; it sends a heartbeat every
second."""
_LOOK_EVERY_S = 0.1
_VIEWS = frozenset({"GetStatus", "GetPlan", "ListSessions", "GetStory", "GetTimelines"})
"""Methods that only look, for which the scope `view` is enough."""
_RETRY_NS = 1_000_000_000

Context = grpc.aio.ServicerContext[Any, Any]


class HasChannel(Protocol):
    """The part of `SchedulerLink` that calls of the Admin service use."""

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """The channel to the scheduler that leads; None while none does."""
        ...

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that are sent with every call."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler's last message or heartbeat."""
        ...

    @property
    def problems(self) -> Mapping[str, str]:
        """The reason why the last stream to an address ended, by address."""
        ...


class SchedulerAdmin:
    """A client of the Admin service of the scheduler that leads."""

    def __init__(self, link: HasChannel) -> None:
        self._link = link

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the scheduler's answer; `group` does not matter with a single group.

        Raises:
            Unavailable: No scheduler leads this gateway, or the one that does is frozen.
            grpc.aio.AioRpcError: The scheduler answered with an error.
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
        """Waits for an answer; raises Unavailable if the scheduler falls silent meanwhile."""
        waiting = asyncio.ensure_future(answer)
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S)
                if done:
                    with _told_if_closed():
                        return waiting.result()
                if self._link.silent_s > FROZEN_AFTER_S:
                    raise Unavailable(
                        f"the scheduler has said nothing for {self._link.silent_s:.1f} s; what was"
                        " asked of it may still happen",
                        retry_after_ns=_RETRY_NS,
                    )
        finally:
            waiting.cancel()

    async def watch_scaling(
        self, request: admin_pb2.WatchScalingRequest
    ) -> AsyncGenerator[admin_pb2.ScalingAdvice, None]:
        """Yields the scheduler's advice, until the scheduler ends the stream.

        Raises:
            Unavailable: No scheduler leads this gateway, or none does any more.
            grpc.aio.AioRpcError: The scheduler ended the stream with an error.
        """
        async with aclosing(self._stream("WatchScaling", request)) as advices:
            async for advice in advices:
                yield advice

    async def import_model(
        self, request: admin_pb2.ImportModelRequest
    ) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
        """Yields how far the scheduler is with an import; closing it cancels the import.

        Raises:
            Unavailable: No scheduler leads this gateway, or none does any more.
            grpc.aio.AioRpcError: The scheduler ended the stream with an error.
        """
        async with aclosing(self._stream("ImportModel", request)) as steps:
            async for step in steps:
                yield step

    async def _stream(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        channel = self._link.channel
        if channel is None:
            raise Unavailable("no scheduler is connected", retry_after_ns=_RETRY_NS)
        rpc = getattr(admin_pb2_grpc.AdminStub(channel), method)
        call = rpc(request, metadata=passed_on(self._link.metadata))
        try:
            with _told_if_closed():
                async for message in call:
                    yield message
        finally:
            call.cancel()


@contextmanager
def _told_if_closed() -> Iterator[None]:
    """Turns the end of a call whose channel was closed into an error that callers can be told.

    A link closes its channel when its stream ends, which cancels the calls over it, and not those
    who wait for them: a task that nobody cancelled must not end as if somebody had.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(
            "the connection to the scheduler is gone; what was asked of it may still happen",
            retry_after_ns=_RETRY_NS,
        ) from None


class AdminService(admin_pb2_grpc.AdminServicer):
    """The Admin service of a gateway.

    If keys are configured, callers need the scope `admin`; for methods that only look, `view`.
    """

    def __init__(
        self,
        keys: ApiKeys,
        scheduler: SchedulerAdmin,
        request_metrics: RequestMetrics,
        requests: RunningRequests,
        known: LocalStatus,
    ) -> None:
        self._keys = keys
        self._scheduler = scheduler
        self._request_metrics = request_metrics
        self._requests = requests
        self._known = known

    @answered
    async def GetStatus(  # noqa: N802 - named by the protocol, like all below
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """Returns the cluster's status, with the outcomes of requests to this gateway.

        While no scheduler answers, it is the last status that this gateway knows, with the reason.
        """
        self._authorize(context, SCOPE_VIEW)
        answer: admin_pb2.GetStatusResponse
        try:
            answer = await self._forward("GetStatus", request, context)
        except Unavailable as error:
            answer = self._known.status(error.message)
        add_attainment(answer, self._request_metrics.outcomes)
        return answer

    @answered
    async def GetPlan(  # noqa: N802
        self, request: admin_pb2.GetPlanRequest, context: Context
    ) -> admin_pb2.GetPlanResponse:
        """Returns the active plan."""
        answer: admin_pb2.GetPlanResponse = await self._forward("GetPlan", request, context)
        return answer

    @answered
    async def SearchPlan(  # noqa: N802
        self, request: admin_pb2.SearchPlanRequest, context: Context
    ) -> admin_pb2.SearchPlanResponse:
        """Forwards a question about a plan: it changes nothing, but keeps a processor busy."""
        answer: admin_pb2.SearchPlanResponse = await self._forward("SearchPlan", request, context)
        return answer

    @answered
    async def ApplyPlan(  # noqa: N802
        self, request: admin_pb2.ApplyPlanRequest, context: Context
    ) -> admin_pb2.ApplyPlanResponse:
        """Forwards a plan that replaces the active one."""
        answer: admin_pb2.ApplyPlanResponse = await self._forward("ApplyPlan", request, context)
        return answer

    @answered
    async def Replan(  # noqa: N802
        self, request: admin_pb2.ReplanRequest, context: Context
    ) -> admin_pb2.ReplanResponse:
        """Forwards the order to compute a new plan."""
        answer: admin_pb2.ReplanResponse = await self._forward("Replan", request, context)
        return answer

    @answered
    async def DeployModel(  # noqa: N802
        self, request: admin_pb2.DeployModelRequest, context: Context
    ) -> admin_pb2.DeployModelResponse:
        """Forwards the order to serve one more model."""
        answer: admin_pb2.DeployModelResponse = await self._forward("DeployModel", request, context)
        return answer

    @answered
    async def UndeployModel(  # noqa: N802
        self, request: admin_pb2.UndeployModelRequest, context: Context
    ) -> admin_pb2.UndeployModelResponse:
        """Forwards the order to serve a model no longer."""
        answer: admin_pb2.UndeployModelResponse = await self._forward(
            "UndeployModel", request, context
        )
        return answer

    async def ImportModel(  # noqa: N802
        self, request: admin_pb2.ImportModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ImportProgress]:
        """Streams how far the import of a model is; the caller cancels it by ending the stream."""
        try:
            self._authorize(context)
            async with aclosing(self._scheduler.import_model(request)) as steps:
                async for step in steps:
                    yield step
        except Exception as error:
            await abort(context, error_of_exception(error))

    @answered
    async def DrainAgent(  # noqa: N802
        self, request: admin_pb2.DrainAgentRequest, context: Context
    ) -> admin_pb2.DrainAgentResponse:
        """Forwards the order to drain an agent: to empty it of its work."""
        answer: admin_pb2.DrainAgentResponse = await self._forward("DrainAgent", request, context)
        return answer

    @answered
    async def UndrainAgent(  # noqa: N802
        self, request: admin_pb2.UndrainAgentRequest, context: Context
    ) -> admin_pb2.UndrainAgentResponse:
        """Forwards the order to use an agent again."""
        answer: admin_pb2.UndrainAgentResponse = await self._forward(
            "UndrainAgent", request, context
        )
        return answer

    @answered
    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        """Returns the sessions that generate, with request ids for those of this gateway."""
        answer: admin_pb2.ListSessionsResponse = await self._forward(
            "ListSessions", request, context
        )
        name_requests(answer, self._request_metrics.gateway_id, self._requests)
        return answer

    @answered
    async def GetStory(  # noqa: N802
        self, request: admin_pb2.GetStoryRequest, context: Context
    ) -> admin_pb2.GetStoryResponse:
        """Returns what happened to a request and its sessions.

        The request may be named by its id if this gateway serves it, or did a while ago.
        """
        self._authorize(context, SCOPE_VIEW)
        known = self._request_metrics
        name_story(request, known.gateway_id, self._requests, known.recent)
        answer: admin_pb2.GetStoryResponse = await self._forward("GetStory", request, context)
        return answer

    @answered
    async def MoveSession(  # noqa: N802
        self, request: admin_pb2.MoveSessionRequest, context: Context
    ) -> admin_pb2.MoveSessionResponse:
        """Forwards the order to move a session.

        The session may be named by its request's id if this gateway serves the request.
        """
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
        """Returns the trace of a recent request of this gateway: where its time went."""
        self._authorize(context, SCOPE_VIEW)
        found = self._request_metrics.recent.find(request.request_id)
        if found is None:
            raise InvalidInput("request_id", "is not among the recent requests of this gateway")
        return trace_of(found, self._request_metrics.gateway_id)

    @answered
    async def GetTimelines(  # noqa: N802
        self, request: admin_pb2.GetTimelinesRequest, context: Context
    ) -> admin_pb2.GetTimelinesResponse:
        """Returns the reservations of every device and link, and how each was used in fact."""
        answer: admin_pb2.GetTimelinesResponse = await self._forward(
            "GetTimelines", request, context
        )
        return answer

    @answered
    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """Returns the recent requests of this gateway, newest first."""
        self._authorize(context, SCOPE_VIEW)
        return recent_requests(self._request_metrics.recent, request.limit)

    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        """Streams the scheduler's advice on the number of agents: at once, and at every change."""
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
