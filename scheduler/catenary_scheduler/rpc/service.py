"""The control endpoint: the leader serves streams of gateways and agents, a standby refuses them.

A stream begins with a short message that says whose it is and which group's leader it is for. Only
when its sender has been identified and this process leads the group may it send packs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_scheduler.agents.registry import AgentStream
from catenary_scheduler.rpc.agent_streams import AgentStreams
from catenary_scheduler.rpc.gateway_registry import GatewayStream
from catenary_scheduler.rpc.gateway_streams import GatewayStreams
from catenary_scheduler.rpc.leader_lookup import Context, LeaderLookup, group_of
from catenary_scheduler.rpc.peer_quarantine import PeerQuarantine
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.control_stream import ControlStream
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from catenary_services.grpc.error_tables import abort
from catenary_services.log import get_logger
from catenary_services.rules import parsed
from catenary_services.security.identity import Identity, Role, require_name
from catenary_services.security.roles import RoleAuthorizer
from catenary_services.security.tls import ServerSecurity
from catenary_services.tcp_listener import TcpListener
from catenary_services.transport.frames import MessageKind

HELLO_TIMEOUT_S = 5.0
"""Seconds without a byte after which a stream that has brought no hello ends."""
MOST_STREAMS = 8_192
MOST_ARRIVING_BYTES = 128 << 20
"""The most memory for packs that have arrived in part, over all streams."""
_ROLES = {
    scheduler_pb2.CONTROL_ROLE_GATEWAY: Role.GATEWAY,
    scheduler_pb2.CONTROL_ROLE_AGENT: Role.AGENT,
}

_log = get_logger(__name__)


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
    """The listener for control streams, and the gRPC service that says where it listens.

    Attributes:
        port: The port of control streams; 0 before `start`.
    """

    def __init__(
        self,
        leaders: LeaderLookup[ServesStreams],
        authorizer: RoleAuthorizer,
        security: ServerSecurity,
    ) -> None:
        """Serves the groups that `leaders` finds a leader of, to peers with certificates."""
        self.leaders = leaders
        self.authorizer = authorizer
        self.budget = ArrivalBudget(MOST_ARRIVING_BYTES)
        self._security = security
        self._listener: TcpListener | None = None
        self._streams: set[ControlStream] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens for streams.

        Raises:
            Unavailable: The address is in use or does not belong to this machine.
        """
        tls = self._security.ssl_context()
        self._listener = TcpListener(
            self._accepted, tls, first_byte=b"C", register=self._security.register
        )
        self.port = await self._listener.start(host, port)

    def close(self) -> None:
        """Stops listening and ends all streams. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for stream in tuple(self._streams):
            stream.close(Unavailable("this scheduler ends"))

    async def GetControlEndpoint(  # noqa: N802 - named by the protocol
        self, _: scheduler_pb2.GetControlEndpointRequest, context: Context
    ) -> scheduler_pb2.GetControlEndpointResponse:
        """Returns the port of control streams, if this process leads the group."""
        try:
            self.leaders.leader(group_of(context) or 0)
        except CatenaryError as error:
            await abort(context, error)
        return scheduler_pb2.GetControlEndpointResponse(port=self.port)

    def entered(self, stream: ControlStream) -> None:
        """Notes a stream whose peer is known.

        Raises:
            Overloaded: There are too many.
        """
        if len(self._streams) >= MOST_STREAMS:
            raise Overloaded(f"{MOST_STREAMS} control streams are open")
        self._streams.add(stream)

    def ended(self, stream: ControlStream) -> None:
        """Takes a stream that is over off those that are counted."""
        self._streams.discard(stream)

    def _accepted(self, settled: Callable[[], None]) -> ControlStream:
        return _Connection(self, settled).stream


class _Connection:
    """One connection from its acceptance to its end, as the handler of its stream."""

    def __init__(self, service: SchedulerService, settled: Callable[[], None]) -> None:
        self._service = service
        self._settled = settled
        self._role = Role.AGENT
        self._group = 0
        self._name = ""
        """The name in the certificate, or without TLS the one in the hello; empty if unknown."""
        self._identity: Identity | None = None
        self._peer: AgentStream | GatewayStream | None = None
        self._quarantine: PeerQuarantine | None = None
        self._waiting: asyncio.TimerHandle | None = None
        """The end of the wait for the hello."""
        self.stream = ControlStream(self, service.budget)

    def received(self, kind: MessageKind, data: bytes) -> None:
        """Takes in what the peer says, and accuses a peer whose messages cannot be."""
        try:
            if kind is MessageKind.PACK and self._peer is not None:
                self._peer.handle(data)
            elif kind is MessageKind.HELLO and self._peer is None:
                self._open(parsed(scheduler_pb2.ControlHello, data))
            else:
                raise InvalidInput("prefix.kind", f"unexpected {kind.name}")
        except InvalidMessage as offence:
            if self._quarantine is not None:
                self._quarantine.accuse(self._role, self._name, offence)
            raise
        except (PermissionDenied, Unauthenticated) as refusal:
            _log.warning("stream_refused", role=str(self._role), reason=refusal.message)
            raise

    def resumed(self) -> None:
        """Goes on writing after the peer has read."""
        if self._peer is not None:
            self._peer.resumed()

    def ended(self, error: CatenaryError) -> None:
        """Forgets the stream, and tells the leader."""
        self._settled()
        if self._waiting is not None:
            self._waiting.cancel()
        self._service.ended(self.stream)
        if self._peer is not None:
            self._peer.ended()

    def _open(self, hello: scheduler_pb2.ControlHello) -> None:
        role = _ROLES.get(hello.role)
        if role is None:
            raise InvalidInput("hello.role", f"{hello.role} opens no control streams")
        self._role, self._group = role, hello.group
        self._identity = self._service.authorizer.stream_identity(self.stream.ssl_object, role)
        self._name = self._identity.name if self._identity is not None else ""
        leader = self._service.leaders.leader(hello.group)
        self._quarantine = leader.peer_quarantine
        self._service.entered(self.stream)
        self._settled()
        self.stream.trust()
        if role is Role.AGENT:
            agent: AgentStream = PeerStream(self.stream, scheduler_pb2.SchedulerToAgentMessages)
            agent.handle = lambda data: self._leader().agent_streams.begin(agent, data, self._says)
            self._peer = agent
        else:
            gateway: GatewayStream = PeerStream(
                self.stream, scheduler_pb2.SchedulerToGatewayMessages
            )
            gateway.handle = lambda data: self._leader().gateway_streams.begin(
                gateway, data, self._says
            )
            self._peer = gateway
        self._await_hello(HELLO_TIMEOUT_S)

    def _leader(self) -> ServesStreams:
        """Returns the leader that the hello is for: another one may lead since the stream began."""
        if self._waiting is not None:
            self._waiting.cancel()
        leader = self._service.leaders.leader(self._group)
        self._quarantine = leader.peer_quarantine
        return leader

    def _says(self, claimed: str) -> None:
        """Checks that the peer may speak for the name it claims, and is not in quarantine."""
        if self._identity is not None:
            require_name(self._identity, claimed)
        self._name = claimed
        assert self._quarantine is not None
        self._quarantine.admit(self._role, claimed)

    def _await_hello(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.call_later(seconds, self._look)

    def _look(self) -> None:
        left_s = self.stream.heard_s + HELLO_TIMEOUT_S - time.monotonic()
        if left_s > 0:
            self._await_hello(left_s)
        else:
            late = InvalidInput("hello", f"nothing came within {HELLO_TIMEOUT_S:g} s")
            self.stream.close(late)
