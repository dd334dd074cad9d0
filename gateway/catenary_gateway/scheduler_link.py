"""The stream between the gateway and the leading scheduler, reopened after every loss."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.errors import CatenaryError, InvalidMessage, Overloaded, PartitionLost
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.grpc.packed_writer import PackedWriter
from catenary_services.log import get_logger
from catenary_services.rules.checking import checking
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
CONNECT_TIMEOUT_S = 3.0
SPACING_S = 0.001
"""Seconds between two writes to the scheduler, at the least. To write and read one costs about as
much as the rest of a small request, so under load requests wait a moment for company."""
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 0.3
"""The longest pause in seconds between attempts to connect. Once a leader's lease is over, nothing
new begins before the next leader is found, so the pause is short."""

_log = get_logger("catenary_gateway.scheduler_link")
_Message = scheduler_pb2.GatewayMessage
_Call: TypeAlias = (
    "grpc.aio.StreamStreamCall["
    "scheduler_pb2.GatewayMessages, scheduler_pb2.SchedulerToGatewayMessages]"
)


MessageHandlers: TypeAlias = Mapping[str, Callable[[Any], None]]


class SchedulerListener(Protocol):
    """Callbacks for everything a scheduler says to this gateway."""

    def hello(self) -> scheduler_pb2.GatewayHello:
        """Returns the first message on a new stream: this gateway's identity."""
        ...

    def connected(self, epoch: int) -> None:
        """Called when a scheduler leads this gateway; submits unfinished requests to it again."""
        ...

    def disconnected(self) -> None:
        """Called when the stream is lost, before another scheduler is sought."""
        ...

    @property
    def handlers(self) -> MessageHandlers:
        """The handlers of orders and tables by the kind of the message; each gets its content.

        Messages of other kinds are ignored: they are for a newer release.
        """
        ...


class SchedulerLink:
    """A connection to the scheduler that leads, made to one address after the other.

    A standby scheduler ends the stream with UNAVAILABLE. Messages are dropped while no
    scheduler leads: at the next `connected` the listener submits again what is unfinished.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Looks for the leader among `addresses`.

        `metadata` names the scheduler group, if the cluster has several.
        """
        self._addresses = tuple(addresses)
        self._security = security
        self.metadata = tuple(metadata)
        """Metadata that are sent with every call to the scheduler."""
        self._writer: PackedWriter[scheduler_pb2.GatewayMessage] | None = None
        self._heard_s = 0.0
        self.invalid: Callable[[], None] = _nothing
        """Called once for each invalid message of a scheduler."""
        self.channel: grpc.aio.Channel | None = None
        """The channel to the scheduler that leads; None while none does."""
        self.problems: dict[str, str] = {}
        """The reason why the last stream to an address ended, by address."""

    @property
    def is_connected(self) -> bool:
        """True between a scheduler's welcome and the loss of its stream."""
        return self._writer is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler's last message or heartbeat."""
        return time.monotonic() - self._heard_s

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the scheduler; drops it while no scheduler leads.

        Raises:
            Overloaded: The scheduler does not read fast enough.
        """
        if self._writer is not None:
            self._writer.put(message)

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message that may wait a moment, to be sent with the next one."""
        if self._writer is not None:
            # A scheduler that does not read is about to be lost; `connected` tells the next one.
            try:
                self._writer.put_soon(message)
            except Overloaded:
                return

    async def run(self, listener: SchedulerListener) -> None:
        """Keeps a stream to the leading scheduler open, until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        turn = 0
        while True:
            address = self._addresses[turn % len(self._addresses)]
            started = time.monotonic()
            try:
                await self._session(address, listener)
            except* InvalidMessage as group:
                # Another address may lead. The pause keeps this one from a tight loop of attempts.
                self.invalid()
                _log.warning("scheduler_unbelievable", address=address, why=_reason(group))
                started = time.monotonic()
                await asyncio.sleep(_LONGEST_BACKOFF_S)
            except* (
                CatenaryError,
                grpc.aio.AioRpcError,
                asyncio.InvalidStateError,  # raised by gRPC on a write to an ended stream
                TimeoutError,
                OSError,
            ) as group:
                self.problems[address] = _reason(group)
                _log.info("scheduler_stream_ended", address=address, why=self.problems[address])
            except* Exception as group:
                # A bug in handling one message must not end the gateway; a new stream may work.
                _log.error("scheduler_stream_failed", address=address, exc_info=group)
            if time.monotonic() - started > SILENCE_S:
                backoff_s = _FIRST_BACKOFF_S
            turn += 1
            # The pause comes after each whole round: where one address is a standby, another leads.
            if turn % len(self._addresses) == 0:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _session(self, address: str, listener: SchedulerListener) -> None:
        channel = open_channel(address, self._security, role=Role.SCHEDULER)
        try:
            stub = scheduler_pb2_grpc.SchedulerStub(checking(channel))
            call = stub.GatewaySession(metadata=self.metadata or None)

            async def send(messages: list[scheduler_pb2.GatewayMessage]) -> None:
                await call.write(scheduler_pb2.GatewayMessages(messages=messages))

            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await send([_Message(hello=listener.hello())])
                    first = await _read(call)
                self._heard_s = time.monotonic()
                writer = PackedWriter(send, spacing_s=SPACING_S)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(writer.run())
                    tasks.create_task(_beat(writer))
                    tasks.create_task(self._watch_silence())
                    tasks.create_task(self._receive(call, first, listener, channel, writer))
            finally:
                call.cancel()
                if self._writer is not None:
                    self._writer = None
                    self.channel = None
                    listener.disconnected()
        finally:
            with suppress(Exception):
                await channel.close()

    async def _receive(
        self,
        call: _Call,
        first: scheduler_pb2.SchedulerToGatewayMessages,
        listener: SchedulerListener,
        channel: grpc.aio.Channel,
        writer: PackedWriter[scheduler_pb2.GatewayMessage],
    ) -> None:
        """Passes messages to the listener, until the stream ends or falls silent with an error."""

        def welcomed(welcome: scheduler_pb2.Welcome) -> None:
            self._writer = writer
            self.channel = channel
            _log.info("scheduler_connected", scheduler=welcome.scheduler_id, epoch=welcome.epoch)
            listener.connected(welcome.epoch)

        handlers = {**listener.handlers, "welcome": welcomed}
        pack = first
        while True:
            for message in pack.messages:
                kind = message.WhichOneof("kind")
                handle = handlers.get(kind or "")
                if handle is not None and kind is not None:
                    handle(getattr(message, kind))
            pack = await _read(call)
            self._heard_s = time.monotonic()

    async def _watch_silence(self) -> None:
        """Ends the session with an error when the scheduler falls silent.

        There is one timer per session, because a timeout around each read costs more than the read.
        """
        while True:
            left_s = self._heard_s + SILENCE_S - time.monotonic()
            if left_s <= 0:
                raise PartitionLost(f"the scheduler was silent for {SILENCE_S:g} s")
            await asyncio.sleep(left_s)


def _nothing() -> None:
    """Does nothing; the default of `SchedulerLink.invalid`."""


async def _read(call: _Call) -> scheduler_pb2.SchedulerToGatewayMessages:
    pack = await call.read()
    if isinstance(pack, InvalidMessage):
        raise pack
    if not isinstance(pack, scheduler_pb2.SchedulerToGatewayMessages):
        raise PartitionLost("the scheduler ended the stream")
    return pack


async def _beat(writer: PackedWriter[scheduler_pb2.GatewayMessage]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        with suppress(Overloaded):
            writer.put(_Message(heartbeat=scheduler_pb2.Heartbeat()))


def _reason(group: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
