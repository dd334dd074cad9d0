"""The sources of the dashboard's answers: the scheduler, or this gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.dashboard import converters
from catenary_gateway.dashboard.local_facts import gateway_facts, history_facts, model_offers
from catenary_gateway.observability.local_answers import (
    add_attainment,
    name_requests,
    name_story,
    recent_requests,
)
from catenary_gateway.observability.waterfall import trace_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput
from catenary_services.grpc.rpc_errors import error_of_rpc

WINDOWS_S = (2, 5, 10, 30)
"""Seconds that timelines may reach back. There are few choices, so that pages share answers."""
AHEAD_NS = 1_000_000_000
TIMEOUT_S = 3.0
"""Seconds to wait for the scheduler. After that a page reports the error and keeps its last
data."""
_SHOWN_REQUESTS = 100

Values = Callable[[], object]


class SchedulerCaller(Protocol):
    """The part of `SchedulerAdmin` that the dashboard uses."""

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the answer of the scheduler, or the joint answer of all groups."""
        ...


@dataclass(frozen=True, slots=True)
class DashboardSources:
    """The data of each answer; errors of the scheduler are raised as `CatenaryError`."""

    pipeline: RequestPipeline
    scheduler: SchedulerCaller

    async def status(self) -> Values:
        """Returns the cluster's status as the scheduler sees it."""
        answer = await self._ask("GetStatus", admin_pb2.GetStatusRequest())
        add_attainment(answer, self.pipeline.plane.request_metrics.outcomes)
        return lambda: converters.values_of(answer)

    async def plan(self) -> Values:
        """Returns the active plan, its promises and the last switch."""
        answer = await self._ask("GetPlan", admin_pb2.GetPlanRequest())
        return lambda: converters.values_of(answer)

    async def sessions(self) -> Values:
        """Returns the sessions that generate, with request ids for those of this gateway."""
        answer = await self._ask("ListSessions", admin_pb2.ListSessionsRequest())
        name_requests(answer, self.pipeline.gateway_id, self.pipeline.sessions)
        return lambda: converters.values_of(answer)

    async def timelines(self, seconds: int) -> Values:
        """Returns the reservations of the last `seconds` and of the next second."""
        request = admin_pb2.GetTimelinesRequest(back_ns=seconds * 10**9, ahead_ns=AHEAD_NS)
        answer = await self._ask("GetTimelines", request)
        return lambda: converters.timelines(answer)

    async def requests(self) -> Values:
        """Returns this gateway's facts and recent requests, which need no scheduler."""
        answer = recent_requests(self.pipeline.plane.request_metrics.recent, _SHOWN_REQUESTS)
        facts = gateway_facts(self.pipeline)
        return lambda: {"gateway": facts, **converters.values_of(answer)}

    async def history(self) -> Values:
        """Returns the last hour of this gateway, which needs no scheduler."""
        facts = history_facts(self.pipeline)
        return lambda: facts

    async def models(self) -> Values:
        """Returns what may be asked of each model here, and whether that takes a key."""
        offers = model_offers(self.pipeline)
        return lambda: offers

    def trace(self, request_id: str) -> dict[str, Any]:
        """Returns the trace of a recent request, of the latest one for an empty id.

        Raises:
            InvalidInput: The request is not among the recent ones of this gateway.
        """
        request_metrics = self.pipeline.plane.request_metrics
        found = request_metrics.recent.find(request_id)
        if found is None:
            raise InvalidInput("request_id", "is not among the recent requests of this gateway")
        trace = converters.values_of(trace_of(found, request_metrics.gateway_id))
        return {**trace, "has_story": found.number > 0}

    async def story(self, session_id: int, request_id: str) -> dict[str, Any]:
        """Returns what happened to a session, or to a request of this gateway, and why.

        Args:
            session_id: The session; 0 if the request is named.
            request_id: The request; empty if the session is named.

        Raises:
            InvalidInput: Not exactly one of them is named, or it is not known, or not any more.
        """
        request = admin_pb2.GetStoryRequest(session_id=session_id, request_id=request_id)
        recent = self.pipeline.plane.request_metrics.recent
        name_story(request, self.pipeline.gateway_id, self.pipeline.sessions, recent)
        return converters.values_of(await self._ask("GetStory", request))

    async def _ask(self, method: str, request: Any) -> Any:
        try:
            return await self.scheduler.call(method, request, TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of_rpc(error) from None


def session_of(text: str | None) -> int:
    """Returns the id of a session; 0 for None.

    Raises:
        InvalidInput: `text` is not a whole number below 2**63.
    """
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) < 1 << 63):
        raise InvalidInput("session_id", "must be a whole number below 2**63")
    return int(text)


def window_of(text: str | None) -> int:
    """Returns the smallest window, in seconds, that shows what a caller wants to see.

    Raises:
        InvalidInput: `text` is not a whole number of seconds from 1 to the widest window.
    """
    widest = WINDOWS_S[-1]
    if text is None:
        return WINDOWS_S[0]
    if not (text.isascii() and text.isdigit() and len(text) <= 2 and 1 <= int(text) <= widest):
        raise InvalidInput("seconds", f"must be a whole number from 1 to {widest}")
    return next(window for window in WINDOWS_S if window >= int(text))
