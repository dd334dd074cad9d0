"""gRPC channels and servers with this project's limits, keepalive, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from catenary_services.grpc.server.call_policy import CallPolicy
from catenary_services.grpc.server.methods import MethodTable
from catenary_services.grpc.server.receiving_budget import ReceivingBudget
from catenary_services.grpc.server.server import MOST_CALLS, GrpcServer
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.security.identity import Role, server_name_of
from catenary_services.security.roles import OpenCallAuthorizer, RoleAuthorizer, RoleCallAuthorizer
from catenary_services.security.tls import ClientSecurity, ServerSecurity

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Default limit of one message. That of gRPC is 4 MiB, less than a batch of images."""

_LIMITS = ConnectionLimits()
_STATUS = health_pb2.HealthCheckResponse

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A killed peer returns within a second or two; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two channels of one process to one address must not share the back-off of a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are addressed directly; a proxy for the outside world must not see this traffic.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    target: str,
    security: ClientSecurity,
    *,
    role: Role | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Returns a channel to `target` ("host:port"); it connects when first used.

    Args:
        target: Address at which the server listens.
        security: Certificates shown to the server and demanded of it.
        role: With TLS, the role the server's certificate must have; None if it must be that of
            `target`.
        max_message_bytes: Limit of one message.
    """
    options: list[tuple[str, int | str]] = [*_CHANNEL_OPTIONS, *_limits(max_message_bytes)]
    credentials = security.channel_credentials()
    if credentials is not None and role is not None:
        name = server_name_of(role, security.cluster)
        options.append(("grpc.ssl_target_name_override", name))
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def create_server(
    security: ServerSecurity,
    *,
    authorizer: RoleAuthorizer | None = None,
    call_policy: CallPolicy | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    limits: ConnectionLimits = _LIMITS,
    most_calls: int = MOST_CALLS,
) -> GrpcServer:
    """Returns a server that listens nowhere yet; `bind` gives it a port.

    The certificate files are read now, so that a wrong path stops the start at once.

    Args:
        security: Certificates shown to clients and demanded of them.
        authorizer: Restricts callers to `catenary_services.security.roles`; None for a port that
            checks API keys.
        call_policy: Limits on messages; None for the limit of one message with every method.
        max_message_bytes: Limit of one message.
        limits: What one peer may do.
        most_calls: The most concurrent calls.
    """
    security.ssl_context()
    taken = call_policy or CallPolicy(usual_bytes=max_message_bytes)
    call_authorizer = taken.call_authorizer or (
        RoleCallAuthorizer(authorizer) if authorizer is not None else OpenCallAuthorizer()
    )
    return GrpcServer(
        call_authorizer,
        MethodTable(taken.most_bytes, taken.usual_bytes, taken.buffer_parsers),
        ReceivingBudget(taken.receiving_bytes, most_of_one=taken.receiving_bytes_of_one),
        limits,
        longest_answer=max_message_bytes,
        most_calls=most_calls,
    )


def bind(server: GrpcServer, host: str, port: int, security: ServerSecurity) -> int:
    """Gives `server` a port and returns it; for port 0 a free one is chosen.

    Raises:
        Unavailable: The address is in use or does not belong to this machine.
    """
    return server.bind(host, port, security)


def _limits(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )


class HealthSwitch(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The `grpc.health.v1.Health` service for a whole server and each of its services.

    It starts as NOT_SERVING. Unlike the servicer of grpcio-health-checking it is switched without
    awaiting, and its watchers end on `shutdown` instead of holding the server's stop back.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset(("", *services))
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """True if probes are answered with SERVING."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Changes the status for probes and watchers; without effect after `shutdown`."""
        if not self._closed and serving != self._serving:
            self._serving = serving
            self._notify()

    async def shutdown(self) -> None:
        """Reports NOT_SERVING for good and ends all watches; idempotent."""
        self._serving = False
        self._closed = True
        self._notify()

    async def Check(  # noqa: N802 - named by the protocol
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        """Answers a probe; NOT_FOUND for a service this server does not have."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _STATUS(status=self._status(request.service))

    async def Watch(  # noqa: N802 - named by the protocol
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Sends the status now and whenever it changes."""
        last: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield _STATUS(status=status)
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._names:
            return int(_STATUS.SERVICE_UNKNOWN)
        return int(_STATUS.SERVING if self._serving else _STATUS.NOT_SERVING)

    def _notify(self) -> None:
        # Those who wait from now on get a new event, because one that is set never makes them wait.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def enable_health_and_reflection(
    server: GrpcServer, services: Sequence[ServiceDescriptor]
) -> HealthSwitch:
    """Adds health and reflection to a server that has not started yet.

    Args:
        server: The server.
        services: Descriptors of its services, from any descriptor pools.

    Returns:
        The switch that says whether the server is ready; off at first.
    """
    switch = HealthSwitch(service.full_name for service in services)
    health_pb2_grpc.add_HealthServicer_to_server(switch, server)
    shown = [
        *services,
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    names = [service.full_name for service in shown]
    pool = _joint_pool(service.file for service in shown)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(names, pool=pool), server
    )
    return switch


def _joint_pool(files: Iterable[FileDescriptor]) -> DescriptorPool:
    """Returns one pool with all `files`; the inference protocol has a private pool of its own."""
    pool = DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        pool.Add(proto)

    for file in files:
        add(file)
    return pool
