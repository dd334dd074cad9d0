"""The sending side of the gRPC transport."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import grpc
import grpc.aio

from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.security.identity import peer_name_of
from catenary_services.security.tls import ClientSecurity
from catenary_services.transport.acknowledgements import Lost
from catenary_services.transport.exchange import (
    introduction,
    lost,
    push_timed_out,
    unless_stalled,
)
from catenary_services.transport.frames import (
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
    encode_prefix,
)
from catenary_services.transport.interface import Capabilities, Slot
from catenary_services.transport.memory import MemoryPool, MemoryShare
from catenary_services.transport.memory_link import MemoryLink, MemorySlot
from catenary_services.transport.settings import TransportSettings

SERVICE = "catenary.v1.PeerTransport"
METHOD = "Frames"
CHUNK_BYTES = 1 << 20
CAPABILITIES = Capabilities(transport="grpc", same_host=False)

_WINDOW_BYTES = 8 << 20
_SMALLEST_CHUNK_BYTES = 64 << 10
_SLOW_CHUNK_S = 0.2
_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", 4 * CHUNK_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
]
_PROVEN_S = 10.0
"""A frame sent so many seconds ago has arrived: otherwise keepalive would have ended the
connection."""


class GrpcLink(MemoryLink):
    """A gRPC stream to one peer, for sending."""

    def __init__(
        self,
        target: tuple[str, str | None],
        pool: MemoryPool,
        settings: TransportSettings,
        on_closed: Callable[[GrpcLink], None],
    ) -> None:
        """Connects to an address; with TLS, the server's certificate must name the peer id."""
        super().__init__(CAPABILITIES, MemoryShare(pool), settings)
        self._on_closed = on_closed
        self._channel = _open_channel(*target, settings.security.client)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )()
        self._turn = asyncio.Lock()
        self._sent = 0
        self._credited = 0
        self._moved = 0
        """A count that changes whenever a part of what is sent has moved on."""
        self._chunk = _SMALLEST_CHUNK_BYTES
        self._credit = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._unproven: deque[tuple[float, Lost]] = deque()
        """Frames that may yet be lost, with the times at which they were sent."""
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.peer_id = ""

    async def introduce(self, peer_id: str) -> None:
        """Sends this process's peer id and waits for the answer."""
        try:
            await self._call.write(introduction(MessageKind.HELLO, peer_id))
            answer = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise lost("grpc", _why(error)) from error
        try:
            if (
                not isinstance(answer, bytes)
                or decode_prefix(answer, 0).kind is not MessageKind.WELCOME
            ):
                raise lost("grpc", "the peer did not say who it is")
        except InvalidInput as error:
            raise lost("grpc", error.message) from error
        self.peer_id = str(answer[PREFIX_BYTES:], "utf-8", "replace")
        self._reading = asyncio.get_running_loop().create_task(self._read_credits())

    async def _read_credits(self) -> None:
        why = "the peer ended the stream"
        try:
            while isinstance(message := await self._call.read(), bytes):
                prefix = decode_prefix(message, 0)
                if prefix.kind is MessageKind.CREDIT and prefix.argument <= self._sent:
                    self._credited = prefix.argument
                    self._moved += 1
                    self._credit.set()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            why = _why(error)
        except InvalidInput as error:
            why = error.message
        finally:
            self._lose(lost("grpc", why))

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header; see `Link.push`."""
        owned = self._pushed(slot, header)
        # The task goes on if the caller is cancelled, because a frame is sent whole or not at all.
        task = asyncio.get_running_loop().create_task(self._send(owned, header))
        self._sending.add(task)
        task.add_done_callback(lambda done: self._sent_or_not(done, owned))
        try:
            await unless_stalled(task, timeout_s, lambda: self._moved)
        except TimeoutError:
            self._lose(lost("grpc", "the peer takes no frames"))
            raise push_timed_out("grpc", timeout_s) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            cancelled_itself = caller is not None and caller.cancelling() > 0
            if task.cancelled() and self._error is not None and not cancelled_itself:
                raise self._error from None
            raise
        if lost_frame is not None:
            self._note_sent(lost_frame)

    def _note_sent(self, lost_frame: Lost) -> None:
        now_s = time.monotonic()
        while self._unproven and now_s - self._unproven[0][0] > _PROVEN_S:
            self._unproven.popleft()
        if self._error is not None:
            lost_frame(self._error)
        else:
            self._unproven.append((now_s, lost_frame))

    async def _send(self, slot: MemorySlot, header: bytes) -> None:
        try:
            async with self._turn:
                view = slot.view
                prefix = encode_prefix(MessagePrefix(MessageKind.FRAME, len(header), len(view)))
                # Header and first part together stay below the receiver's message limit.
                at = self._chunk
                await self._write(b"".join((prefix, header, view[:at])))
                while at < len(view):
                    chunk = view[at : at + self._chunk]
                    at += len(chunk)
                    await self._write(bytes(chunk))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self._lose(lost("grpc", _why(error)))
            assert self._error is not None
            raise self._error from error

    def _sent_or_not(self, task: asyncio.Task[None], slot: MemorySlot) -> None:
        # Not at the end of `_send`: a task cancelled before its first step never gets there.
        self._sending.discard(task)
        slot.give_back()
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it

    async def _write(self, message: bytes) -> None:
        while self._sent - self._credited > _WINDOW_BYTES - len(message):
            self._credit.clear()
            await self._credit.wait()
        self._sent += len(message)
        began_s = time.monotonic()
        await self._call.write(message)
        self._moved += 1
        self._fit_chunk(time.monotonic() - began_s)

    def _fit_chunk(self, took_s: float) -> None:
        """Makes chunks as large as the network is fast, so that progress shows between them."""
        if took_s > _SLOW_CHUNK_S:
            self._chunk = max(self._chunk // 2, _SMALLEST_CHUNK_BYTES)
        elif took_s < _SLOW_CHUNK_S / 4:
            self._chunk = min(self._chunk * 2, CHUNK_BYTES)

    def _lose(self, error: PartitionLost) -> None:
        if self._error is not None:
            return
        self._error = error
        self._share.close(error)
        self._call.cancel()
        for task in self._sending:
            task.cancel()
        self._closing = asyncio.get_running_loop().create_task(self._release_channel())
        unproven, self._unproven = self._unproven, deque()
        now_s = time.monotonic()
        for sent_s, lost_frame in unproven:
            if now_s - sent_s <= _PROVEN_S:
                lost_frame(error)

    async def _release_channel(self) -> None:
        try:
            if self._sending:
                await asyncio.wait(tuple(self._sending), timeout=1.0)
            await self._channel.close()
        finally:
            self._on_closed(self)

    async def close(self) -> None:
        """Closes the link and takes back every slot."""
        self._lose(PartitionLost("the link was closed"))
        for task in (self._reading, self._closing):
            if task is not None and task is not asyncio.current_task():
                with contextlib.suppress(Exception):
                    await asyncio.wait((task,), timeout=2.0)


def _open_channel(address: str, peer_id: str | None, security: ClientSecurity) -> grpc.aio.Channel:
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options: list[tuple[str, int | str]] = [*_OPTIONS]
    if peer_id is not None:
        name = peer_name_of(peer_id, security.cluster)
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
