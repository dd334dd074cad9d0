"""The stream between the gateway and the leading scheduler, reopened after every loss."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import grpc.aio

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.control.connecting import Heartbeats, open_stream
from catenary_services.control.control_stream import ControlStream, SchedulerEnd
from catenary_services.control.pack_writer import PackWriter
from catenary_services.errors import CatenaryError, InvalidMessage, Overloaded
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.log import get_logger
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
CONNECT_TIMEOUT_S = 3.0
SPACING_S = 0.001
"""Seconds between two packs to the scheduler, at the least. To write and read one costs far more
than a message in it, so under load requests wait a moment for company."""
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 0.3
"""The longest pause in seconds between attempts to connect. Once a leader's lease is over, nothing
new begins before the next leader is found, so the pause is short."""

_log = get_logger("catenary_gateway.scheduler_link")
_Message = scheduler_pb2.GatewayMessage


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

    A standby scheduler refuses the stream as UNAVAILABLE. Messages are dropped while no scheduler
    leads: at the next `connected` the listener submits again what is unfinished.
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
        self._writer: PackWriter[scheduler_pb2.GatewayMessage] | None = None
        self._stream: ControlStream | None = None
        """The last stream, which may have ended."""
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
        return time.monotonic() - (self._stream.heard_s if self._stream is not None else 0.0)

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
            except CatenaryError as error:
                self.problems[address] = f"{error.reason}: {error.message}"
                _log.info("scheduler_stream_ended", address=address, why=self.problems[address])
                if isinstance(error, InvalidMessage):
                    # Another address may lead. The pause keeps this one from a tight loop.
                    started = time.monotonic()
                    await asyncio.sleep(_LONGEST_BACKOFF_S)
            except Exception:
                # A bug in handling one message must not end the gateway; a new stream may work.
                _log.exception("scheduler_stream_failed", address=address)
            if time.monotonic() - started > SILENCE_S:
                backoff_s = _FIRST_BACKOFF_S
            turn += 1
            # The pause comes after each whole round: where one address is a standby, another leads.
            if turn % len(self._addresses) == 0:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _session(self, address: str, listener: SchedulerListener) -> None:
        """Exchanges messages with one scheduler until the stream ends; always raises the reason."""
        channel = open_channel(address, self._security, role=Role.SCHEDULER)
        session = _Session(self.invalid, listener.handlers)

        def welcomed(welcome: scheduler_pb2.Welcome) -> None:
            self._writer = session.writer
            self.channel = channel
            _log.info("scheduler_connected", scheduler=welcome.scheduler_id, epoch=welcome.epoch)
            listener.connected(welcome.epoch)

        session.handlers["welcome"] = welcomed
        heartbeats: Heartbeats | None = None
        try:
            await open_stream(
                session.end.stream,
                address,
                channel,
                Role.GATEWAY,
                self._security,
                self.metadata,
                timeout_s=CONNECT_TIMEOUT_S,
            )
            self._stream = session.end.stream
            session.write([_Message(hello=listener.hello())])
            heartbeats = Heartbeats(session.end.stream, session.beat, HEARTBEAT_S, SILENCE_S)
            await session.end.over
        finally:
            if heartbeats is not None:
                heartbeats.stop()
            session.end.stream.abort()
            session.writer.close()
            if self._writer is session.writer:
                self._writer = None
                self.channel = None
                listener.disconnected()
            with suppress(Exception):
                await channel.close()


class _Session:
    """One stream to a scheduler, with the queue in front of it."""

    def __init__(self, invalid: Callable[[], None], handlers: MessageHandlers) -> None:
        self.handlers = dict(handlers)
        self.end = SchedulerEnd(
            scheduler_pb2.SchedulerToGatewayMessages, self._take, self._resumed, invalid
        )
        self.writer: PackWriter[scheduler_pb2.GatewayMessage] = PackWriter(
            self.write, self._is_full, spacing_s=SPACING_S
        )

    def write(self, messages: list[scheduler_pb2.GatewayMessage]) -> None:
        """Writes messages as one pack, ahead of all that waits."""
        self.end.write(scheduler_pb2.GatewayMessages(messages=messages))

    def beat(self) -> None:
        """Queues a heartbeat, unless the queue is full and says enough."""
        with suppress(Overloaded):
            self.writer.put(_Message(heartbeat=scheduler_pb2.Heartbeat()))

    def _take(self, pack: scheduler_pb2.SchedulerToGatewayMessages) -> None:
        for message in pack.messages:
            said = message.WhichOneof("kind")
            if said is not None and (handle := self.handlers.get(said)) is not None:
                handle(getattr(message, said))

    def _resumed(self) -> None:
        self.writer.resumed()

    def _is_full(self) -> bool:
        return self.end.stream.is_full


def _nothing() -> None:
    """Does nothing; the default of `SchedulerLink.invalid`."""
