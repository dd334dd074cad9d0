"""The side of a gateway or an agent: it finds a scheduler's control endpoint and connects to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.addresses import host_port, split_host_port
from catenary_services.control.control_stream import ControlStream
from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import NotSupported, Unavailable
from catenary_services.grpc.rpc_errors import error_of_rpc
from catenary_services.rules import check
from catenary_services.security.identity import Role, identity_of_socket, require_role
from catenary_services.security.tls import ClientSecurity
from catenary_services.transport.frames import MessageKind

_ROLES = {
    Role.GATEWAY: scheduler_pb2.CONTROL_ROLE_GATEWAY,
    Role.AGENT: scheduler_pb2.CONTROL_ROLE_AGENT,
}


async def open_stream(  # noqa: PLR0913
    stream: ControlStream,
    address: str,
    channel: grpc.aio.Channel,
    role: Role,
    security: ClientSecurity,
    metadata: Sequence[tuple[str, str]] = (),
    *,
    timeout_s: float,
) -> None:
    """Connects a stream to the scheduler at an address, and says which role opens it.

    Args:
        stream: The stream; packs may be written to it afterwards.
        address: Where the scheduler serves gRPC, "host:port".
        channel: A gRPC channel to `address`.
        role: The role of this process.
        security: Certificates shown to the scheduler and demanded of it.
        metadata: Names the scheduler group whose leader is sought, if there are several.
        timeout_s: Seconds for all of it.

    Raises:
        CatenaryError: The scheduler does not lead, cannot be reached, or is none.
    """
    host, _ = split_host_port(address)
    group = int(dict(metadata).get(GROUP_METADATA, "0"))
    try:
        async with asyncio.timeout(timeout_s):
            port = await _control_port(channel, address, metadata)
            await connected(stream, host, port, role, security, group)
    except TimeoutError:
        raise Unavailable(f"{address} did not answer within {timeout_s:g} s") from None


async def connected(
    stream: ControlStream,
    host: str,
    port: int,
    role: Role,
    security: ClientSecurity,
    group: int = 0,
) -> None:
    """Connects a stream to a control endpoint, and says which role opens it.

    Raises:
        CatenaryError: The endpoint cannot be reached, or is none.
    """
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: stream,
            host,
            port,
            ssl=security.peer_context(),
            # The scheduler is recognised by the role in its certificate, not by a host name.
            server_hostname=None if security.insecure else "",
        )
    except OSError as error:
        raise Unavailable(f"control streams at {host_port(host, port)}: {error}") from error
    if not security.insecure:
        security.register(transport)
        identity = identity_of_socket(stream.ssl_object)
        require_role(identity, security.cluster, (Role.SCHEDULER,), "take control streams")
    hello = scheduler_pb2.ControlHello(role=_ROLES[role], group=group)
    stream.trust()
    stream.write(MessageKind.HELLO, hello.SerializeToString())


async def _control_port(
    channel: grpc.aio.Channel, address: str, metadata: Sequence[tuple[str, str]]
) -> int:
    try:
        found = await scheduler_pb2_grpc.SchedulerStub(channel).GetControlEndpoint(
            scheduler_pb2.GetControlEndpointRequest(), metadata=tuple(metadata) or None
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotSupported(f"{address} is of a release with other control streams") from error
        raise error_of_rpc(error) from error
    check(found)
    return int(found.port)


class Heartbeats:
    """The heartbeats of this end of a stream, and the watch over those of the other end."""

    def __init__(
        self, stream: ControlStream, beat: Callable[[], None], interval_s: float, silence_s: float
    ) -> None:
        """Calls `beat` every `interval_s`, and ends a stream of which nothing is heard any more.

        There is one timer per stream, because one around each message costs more than the message.
        """
        self._stream = stream
        self._beat = beat
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(interval_s, self._beats)
        self._watch = self._loop.call_later(silence_s, self._look)

    def stop(self) -> None:
        """Ends both. Idempotent."""
        self._next.cancel()
        self._watch.cancel()

    def _beats(self) -> None:
        self._next = self._loop.call_later(self._interval_s, self._beats)
        self._beat()

    def _look(self) -> None:
        left_s = self._stream.heard_s + self._silence_s - time.monotonic()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._stream.close(Unavailable(f"the scheduler was silent for {self._silence_s:g} s"))
