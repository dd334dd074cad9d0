"""What each answer of the dashboard is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from catenary_gateway.admission.front_desk import FrontDesk
from catenary_gateway.dashboard import converters
from catenary_gateway.dashboard.local_facts import gateway_facts
from catenary_gateway.observability.local_answers import (
    add_attainment,
    name_requests,
    recent_requests,
)
from catenary_gateway.observability.waterfall import trace_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput
from catenary_services.grpc.rpc_errors import error_of_rpc

WINDOWS_S = (2, 5, 10, 30)
"""How far back timelines may reach; a few, so that pages share answers."""
AHEAD_NS = 1_000_000_000
TIMEOUT_S = 3.0
"""A page that waits longer says so and shows what it had."""
_SHOWN_REQUESTS = 100

Values = Callable[[], object]


class AsksScheduler(Protocol):
    """What is needed of `SchedulerAdmin`."""

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the answer of the scheduler, or of all groups' together."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Gets what pages show; what the scheduler answers instead is raised as a `CatenaryError`."""

    desk: FrontDesk
    scheduler: AsksScheduler

    async def status(self) -> Values:
        """The cluster as the scheduler sees it."""
        answer = await self._ask("GetStatus", admin_pb2.GetStatusRequest())
        add_attainment(answer, self.desk.plane.books.outcomes)
        return lambda: converters.values_of(answer)

    async def plan(self) -> Values:
        """The plan in force, its promises, the last switch."""
        answer = await self._ask("GetPlan", admin_pb2.GetPlanRequest())
        return lambda: converters.values_of(answer)

    async def sessions(self) -> Values:
        """The sessions that generate, those of this gateway with the ids of their requests."""
        answer = await self._ask("ListSessions", admin_pb2.ListSessionsRequest())
        name_requests(answer, self.desk.gateway_id, self.desk.sessions)
        return lambda: converters.values_of(answer)

    async def timelines(self, seconds: int) -> Values:
        """The book of the last seconds and the next."""
        request = admin_pb2.GetTimelinesRequest(back_ns=seconds * 10**9, ahead_ns=AHEAD_NS)
        answer = await self._ask("GetTimelines", request)
        return lambda: converters.timelines(answer)

    async def requests(self) -> Values:
        """What this gateway knows, whether a scheduler leads it or not."""
        answer = recent_requests(self.desk.plane.books.recent, _SHOWN_REQUESTS)
        facts = gateway_facts(self.desk)
        return lambda: {"gateway": facts, **converters.values_of(answer)}

    def trace(self, request_id: str) -> dict[str, Any]:
        """Returns where the time of one recent request went, of the latest for an empty id.

        Raises:
            InvalidInput: this gateway does not remember it.
        """
        books = self.desk.plane.books
        found = books.recent.find(request_id)
        if found is None:
            raise InvalidInput("request_id", "is not among the recent requests of this gateway")
        return converters.values_of(trace_of(found, books.gateway_id))

    async def _ask(self, method: str, request: Any) -> Any:
        try:
            return await self.scheduler.call(method, request, TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of_rpc(error) from None


def window_of(text: str | None) -> int:
    """Returns the seconds of a window wide enough for what a caller wants to see.

    Raises:
        InvalidInput: it is no whole number of seconds from 1 to the widest window.
    """
    widest = WINDOWS_S[-1]
    if text is None:
        return WINDOWS_S[0]
    if not (text.isascii() and text.isdigit() and len(text) <= 2 and 1 <= int(text) <= widest):
        raise InvalidInput("seconds", f"must be a whole number from 1 to {widest}")
    return next(window for window in WINDOWS_S if window >= int(text))
