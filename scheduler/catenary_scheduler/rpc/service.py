"""The Scheduler service with its two streams: the leader serves them, a standby refuses them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from catenary_protos.catenary.v1 import scheduler_pb2_grpc
from catenary_scheduler.rpc.agent_streams import AgentStreams
from catenary_scheduler.rpc.gateway_streams import GatewayStreams
from catenary_scheduler.rpc.leader_lookup import Context, LeaderLookup, group_of
from catenary_scheduler.rpc.peer_quarantine import PeerQuarantine
from catenary_scheduler.wire.streams import GrpcStream, Speaks
from catenary_services.errors import CatenaryError, InvalidMessage
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.security.identity import Role
from catenary_services.security.roles import RoleAuthorizer


class ServesStreams(Protocol):
    """The part of a leader that serves streams."""

    @property
    def gateway_streams(self) -> GatewayStreams: ...

    @property
    def agent_streams(self) -> AgentStreams: ...

    @property
    def peer_quarantine(self) -> PeerQuarantine:
        """The quarantine of peers whose messages cannot be true."""
        ...


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Implements the Scheduler service: long-lived streams of gateways and agents."""

    def __init__(self, leaders: LeaderLookup[ServesStreams], authorizer: RoleAuthorizer) -> None:
        self._leaders = leaders
        self._authorizer = authorizer

    async def GatewaySession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serves a gateway's stream: requests come in, dispatches go out."""
        await self._serve(context, Role.GATEWAY, lambda leader: leader.gateway_streams.serve)

    async def AgentSession(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serves an agent's stream: reports come in, orders go out."""
        await self._serve(context, Role.AGENT, lambda leader: leader.agent_streams.serve)

    async def _serve(
        self,
        context: Context,
        role: Role,
        server_of: Callable[
            [ServesStreams], Callable[[GrpcStream[object, object], Speaks], Awaitable[None]]
        ],
    ) -> None:
        leader: ServesStreams | None = None
        name = ""

        def speaks(claimed: str) -> None:
            nonlocal name
            self._authorizer.check_name(context, claimed)
            name = claimed
            assert leader is not None
            leader.peer_quarantine.admit(role, claimed)

        try:
            leader = self._leaders.leader(group_of(context) or 0)
            await server_of(leader)(context, speaks)
            return
        except InvalidMessage as offence:
            assert leader is not None
            leader.peer_quarantine.accuse(role, name or self._name(context), offence)
            error: CatenaryError = offence
        except CatenaryError as known:
            error = known
        except Exception as unknown:
            error = error_of_exception(unknown)
        if not context.cancelled():
            await abort(context, error)

    def _name(self, context: Context) -> str:
        identity = self._authorizer.identity(context)
        return identity.name if identity is not None else ""
