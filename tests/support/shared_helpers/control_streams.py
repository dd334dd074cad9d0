"""Control streams by script: the end of a gateway or an agent, and that of a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.connecting import open_stream
from catenary_services.control.control_stream import ControlStream
from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity
from catenary_services.tcp_listener import TcpListener
from catenary_services.transport.frames import MessageKind

_UP = {
    scheduler_pb2.CONTROL_ROLE_GATEWAY: scheduler_pb2.GatewayMessages,
    scheduler_pb2.CONTROL_ROLE_AGENT: scheduler_pb2.AgentMessages,
}
_DOWN = {
    Role.GATEWAY: scheduler_pb2.SchedulerToGatewayMessages,
    Role.AGENT: scheduler_pb2.SchedulerToAgentMessages,
}
_OPEN = ClientSecurity(insecure=True)


class ScriptedEnd:
    """One end of a stream, whose packs are read and written one by one."""

    def __init__(self, kind: type[Any] | None = None) -> None:
        self._kind = kind
        self._packs: asyncio.Queue[Any] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.stream = ControlStream(self, ArrivalBudget(256 << 20))
        self.opened: Callable[[], None] = _nothing
        """Called when the other end has said which role it has and whose leader it looks for."""
        self.group = 0
        self.error: CatenaryError | None = None
        """The reason why the stream ended."""

    def received(self, kind: MessageKind, data: bytes) -> None:
        if kind is MessageKind.HELLO:
            hello = scheduler_pb2.ControlHello.FromString(data)
            self._kind, self.group = _UP[hello.role], hello.group
            self.stream.trust()
            self.opened()
        else:
            assert self._kind is not None
            self._packs.put_nowait(self._kind.FromString(data))

    def resumed(self) -> None:
        self._has_room.set()

    def ended(self, error: CatenaryError) -> None:
        self.error = error
        self._packs.put_nowait(None)
        self._has_room.set()
        self.opened()

    async def read(self) -> Any:
        """Returns the next pack, None once the stream is over."""
        pack = await self._packs.get()
        if pack is None:
            self._packs.put_nowait(None)
        return pack

    async def write(self, pack: Any) -> None:
        """Writes a pack once there is room for it; without effect once the stream is over."""
        await self.write_bytes(pack.SerializeToString())

    async def write_bytes(self, data: bytes) -> None:
        self.stream.write(MessageKind.PACK, data)
        while self.stream.is_full and not self.stream.closed:
            self._has_room.clear()
            await self._has_room.wait()


async def opened(
    address: str, role: Role, *, group: int | None = None, security: ClientSecurity = _OPEN
) -> ScriptedEnd:
    """Returns the end of a stream to the scheduler at an address.

    Raises:
        CatenaryError: The scheduler has refused already.
    """
    end = ScriptedEnd(_DOWN[role])
    metadata = () if group is None else ((GROUP_METADATA, str(group)),)
    async with open_channel(address, security, role=Role.SCHEDULER) as channel:
        await open_stream(end.stream, address, channel, role, security, metadata, timeout_s=30.0)
    return end


@asynccontextmanager
async def talking(
    address: str, role: Role, *, group: int | None = None, security: ClientSecurity = _OPEN
) -> AsyncIterator[ScriptedEnd]:
    """`opened`, and closed at the end."""
    end = await opened(address, role, group=group, security=security)
    try:
        yield end
    finally:
        end.stream.abort()


class ScriptedEndpoint(scheduler_pb2_grpc.SchedulerServicer):
    """The control endpoint of a scheduler whose part is a script: `serve`."""

    def __init__(self) -> None:
        self._listener: TcpListener | None = None
        self._control_port = 0
        self._serving: set[asyncio.Task[None]] = set()

    def refusal(self, group: int) -> CatenaryError | None:
        """Returns why streams for the leader of a group are refused; None if they are not."""
        return None

    async def serve(self, end: ScriptedEnd) -> None:
        """Serves a stream; once it returns, or raises, the stream ends."""
        raise NotImplementedError

    async def listen(self) -> None:
        self._listener = TcpListener(self._accepted, None, first_byte=b"C")
        self._control_port = await self._listener.start("127.0.0.1", 0)

    async def hang_up(self) -> None:
        """Ends all streams and listens no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def GetControlEndpoint(self, request: Any, context: Any) -> Any:  # noqa: N802
        group = dict(context.invocation_metadata()).get(GROUP_METADATA, "0")
        error = self.refusal(int(group))
        if error is not None:
            await abort(context, error)
        return scheduler_pb2.GetControlEndpointResponse(port=self._control_port)

    def _accepted(self, settled: Callable[[], None]) -> ControlStream:
        end = ScriptedEnd()

        def begins() -> None:
            settled()
            end.opened = _nothing
            if end.error is None:
                task = asyncio.ensure_future(self._serve(end))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

        end.opened = begins
        return end.stream

    async def _serve(self, end: ScriptedEnd) -> None:
        try:
            refused = self.refusal(end.group)
            if refused is not None:
                raise refused
            await self.serve(end)
        except Exception as error:
            end.stream.close(error_of_exception(error))
        finally:
            if not end.stream.closed:
                end.stream.abort()


def _nothing() -> None:
    """Does nothing."""
