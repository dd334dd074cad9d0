"""The Scheduler service: two streams. Thin: whoever leads serves them, a standby refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from catenary_protos.catenary.v1 import scheduler_pb2_grpc
from scheduler.admin import Office, group_of
from scheduler.sessions import Stream
from scheduler.term import Term
from services.error_tables import abort, error_of_exception
from services.errors import CatenaryError

Context = grpc.aio.ServicerContext[object, object]


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Long-lived streams of gateways and agents."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def GatewaySession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Requests up, dispatches down."""
        await self._serve(context, lambda term: term.gateways.serve)

    async def AgentSession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Reports up, orders down."""
        await self._serve(context, lambda term: term.agents.serve)

    async def _serve(
        self,
        context: Context,
        server_of: Callable[[Term], Callable[[Stream[object, object]], Awaitable[None]]],
    ) -> None:
        try:
            await server_of(self._office.term(group_of(context) or 0))(context)
            return
        except CatenaryError as known:
            error = known
        except Exception as unknown:
            error = error_of_exception(unknown)
        if not context.cancelled():
            await abort(context, error)
