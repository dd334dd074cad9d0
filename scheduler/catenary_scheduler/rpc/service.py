"""The Scheduler service: two streams. Thin: whoever leads serves them, a standby refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2_grpc
from catenary_scheduler.rpc.leader_lookup import Context, LeaderLookup, group_of
from catenary_scheduler.wire.streams import Speaks, Stream
from catenary_services.errors import CatenaryError, InvalidMessage
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.security.identity import Role
from catenary_services.security.roles import Guard

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import Term


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Long-lived streams of gateways and agents."""

    def __init__(self, leaders: LeaderLookup, guard: Guard) -> None:
        self._leaders = leaders
        self._guard = guard

    async def GatewaySession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Requests up, dispatches down."""
        await self._serve(context, Role.GATEWAY, lambda term: term.gateways.serve)

    async def AgentSession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Reports up, orders down."""
        await self._serve(context, Role.AGENT, lambda term: term.agents.serve)

    async def _serve(
        self,
        context: Context,
        role: Role,
        server_of: Callable[[Term], Callable[[Stream[object, object], Speaks], Awaitable[None]]],
    ) -> None:
        term: Term | None = None
        name = ""

        def speaks(claimed: str) -> None:
            nonlocal name
            self._guard.check_name(context, claimed)
            name = claimed
            assert term is not None
            term.offenders.admit(role, claimed)

        try:
            term = self._leaders.term(group_of(context) or 0)
            await server_of(term)(context, speaks)
            return
        except InvalidMessage as offence:
            assert term is not None
            term.offenders.accuse(role, name or self._name(context), offence)
            error: CatenaryError = offence
        except CatenaryError as known:
            error = known
        except Exception as unknown:
            error = error_of_exception(unknown)
        if not context.cancelled():
            await abort(context, error)

    def _name(self, context: Context) -> str:
        identity = self._guard.identity(context)
        return identity.name if identity is not None else ""
