"""The stream to the leading scheduler: hello, orders down, reports up.

The addresses are tried one after another until a scheduler sends a welcome; a standby refuses with
UNAVAILABLE. The loss of the stream does not affect the data plane: batches continue, and reports
wait in the outbox.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import grpc
import grpc.aio

from catenary_agent.engine.reporting import FixedMessage
from catenary_agent.outbox import Outbox
from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.domain.groups import EPOCH_FIELD, is_epoch
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    StaleEpoch,
    Unavailable,
)
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.grpc.rpc_errors import error_of_rpc
from catenary_services.log import get_logger
from catenary_services.rules.checking import checking
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity

_log = get_logger("catenary_agent.control")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.4
_PACK = 1_024
"""The most messages in one write."""

_Call = Any  # grpc.aio.StreamStreamCall; its stubs do not know our messages


class CommandHandler(Protocol):
    """Carries out the orders of the scheduler.

    Its methods run on the event loop and must not block.
    """

    @property
    def epoch(self) -> int:
        """The highest epoch seen."""
        ...

    def raise_epoch(self, epoch: int) -> None:
        """Refuses from now on orders of schedulers with a lower epoch."""
        ...

    def forget_epoch(self) -> None:
        """Accepts the next leader whatever its epoch, because the present one is proven wrong."""
        ...

    def hello(self) -> scheduler_pb2.AgentHello:
        """Returns the agent's identity and what it holds, as of now."""
        ...

    def obey(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        """Carries out one order of the leader."""
        ...

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """Returns the running steps, as of now."""
        ...

    def refused(self) -> None:
        """Notes that an order of a former leader was refused."""
        ...


@dataclass(frozen=True, slots=True)
class ControlTimeouts:
    """The interval of heartbeats and the longest silence of the scheduler, in seconds."""

    heartbeat_s: float = 1.0
    silence_s: float = 3.0


class ControlStream:
    """Keeps a session with the scheduler that leads."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        orders: CommandHandler,
        outbox: Outbox,
        times: ControlTimeouts | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Sends the messages of `outbox` and passes orders to `orders`.

        `metadata` is sent with the stream: the scheduler group of the agent, if there are several.
        """
        self._addresses = list(addresses)
        self._security = security
        self._orders = orders
        self._outbox = outbox
        self._times = times or ControlTimeouts()
        self._metadata = tuple(metadata)
        self.connected = asyncio.Event()
        """Set while a leader has sent a welcome."""
        self.invalid: Callable[[], None] = _nothing
        """Called for each message of a scheduler that is invalid."""
        self.leader = ""
        """The id of the scheduler process, new at every start, that has the highest epoch seen."""
        self._sent = asyncio.Event()
        self._writing = False

    async def run(self) -> None:
        """Keeps connecting until cancelled."""
        pause_s = _FIRST_PAUSE_S
        for address in cycle(self._addresses):
            try:
                await self._session(address)
            except InvalidMessage as error:
                # Another scheduler may lead now or later; this one is not worth a tight loop.
                self.invalid()
                _log.warning("scheduler_unbelievable", address=address, why=error.message)
                self.connected.clear()
                pause_s = _LONGEST_PAUSE_S
            except (CatenaryError, grpc.aio.AioRpcError, OSError) as error:  # with TimeoutError
                _log.info("scheduler_away", address=address, error=_describe(error))
                self._forget_if_told(error)
            except Exception:
                # A bug in carrying out one order must not end the agent; a new stream may work.
                _log.error("scheduler_stream_failed", address=address, exc_info=True)
            if self.connected.is_set():
                self.connected.clear()
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def _forget_if_told(self, error: BaseException) -> None:
        """Forgets the epoch if the leader says that it is impossible, after damage or deceit.

        A leader that is merely stale does not say so: its epoch is close to the agent's.
        """
        said = error_of_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
        if isinstance(said, InvalidInput) and said.details.get("field") == EPOCH_FIELD:
            _log.warning("epoch_forgotten", epoch=self._orders.epoch)
            self._orders.forget_epoch()
            self.leader = ""

    async def flush(self, timeout_s: float) -> bool:
        """Returns True once everything queued so far was sent, False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._outbox) or self._writing:
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            return False
        return True

    async def _session(self, address: str) -> None:
        """Exchanges messages with one scheduler until the stream ends; always raises the reason."""
        channel = open_channel(address, self._security, role=Role.SCHEDULER)
        try:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(checking(channel))
            call = stub.AgentSession(metadata=self._metadata or None)
            try:
                await self._greet(call, address)
                await _first_failure(self._read(call), self._write(call))
            finally:
                call.cancel()
        finally:
            await channel.close()

    async def _greet(self, call: _Call, address: str) -> None:
        """Sends a hello and waits for the welcome.

        Raises:
            Unavailable: The answer is not a welcome.
            StaleEpoch: The scheduler is a former leader.
            InvalidInput: Its epoch is impossible.
        """
        hello = scheduler_pb2.AgentMessage(hello=self._orders.hello())
        async with asyncio.timeout(self._times.silence_s):
            await _write(call, [hello])
            received = await _read(call)
        first, *others = received.messages or [scheduler_pb2.SchedulerToAgentMessage()]
        if first.WhichOneof("kind") != "welcome":
            raise Unavailable(f"{address} answered hello with something else than welcome")
        epoch = max(first.epoch, first.welcome.epoch)
        if self._is_stale(epoch, first.welcome.leader):
            self._orders.refused()
            async with asyncio.timeout(self._times.silence_s):
                await _write(call, [self._refusal(epoch)])
            raise StaleEpoch(f"{address} leads epoch {epoch}; {self._orders.epoch} was seen")
        if not is_epoch(epoch):
            raise InvalidInput("welcome.epoch", f"{address} says {epoch}, which is no epoch")
        self._orders.raise_epoch(epoch)
        self.leader = first.welcome.leader
        _log.info("scheduler_found", scheduler=first.welcome.scheduler_id, epoch=epoch)
        self.connected.set()
        for message in others:
            self._receive(message)

    def _is_stale(self, epoch: int, leader: str) -> bool:
        """Returns True for a former leader, and for a second one with the present epoch.

        Two schedulers have the same epoch if Redis forgot that it had granted it (a promoted
        replica lacked the last writes). The one that is met second raises its epoch and connects
        again.
        """
        if epoch != self._orders.epoch:
            return epoch < self._orders.epoch
        return bool(leader and self.leader) and leader != self.leader

    async def _read(self, call: _Call) -> None:
        while True:
            try:
                async with asyncio.timeout(self._times.silence_s):
                    received = await _read(call)
            except TimeoutError:
                raise Unavailable("the scheduler is silent") from None
            for message in received.messages:
                self._receive(message)

    def _receive(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        if message.WhichOneof("kind") in (None, "heartbeat"):
            return
        epoch = max(message.epoch, message.welcome.epoch)
        if epoch < self._orders.epoch:
            _log.warning("order_refused", order_epoch=epoch, agent_epoch=self._orders.epoch)
            self._orders.refused()
            self._outbox.put(FixedMessage(self._refusal(epoch)))
            return
        if not is_epoch(epoch):
            raise InvalidInput("epoch", f"an order says {epoch}, which is no epoch")
        self._orders.raise_epoch(epoch)
        self._orders.obey(message)

    def _refusal(self, epoch: int) -> scheduler_pb2.AgentMessage:
        return scheduler_pb2.AgentMessage(
            order_refused=scheduler_pb2.OrderRefused(
                order_epoch=epoch, agent_epoch=self._orders.epoch
            )
        )

    async def _write(self, call: _Call) -> None:
        """Sends all queued messages at once, and a heartbeat when one is due."""
        beat = time.monotonic()
        while True:
            left_s = beat + self._times.heartbeat_s - time.monotonic()
            taken = await self._outbox.take(_PACK, max(0.0, left_s))
            messages = [item.message() for item in taken]
            if time.monotonic() >= beat + self._times.heartbeat_s:
                beaten = scheduler_pb2.AgentMessage(heartbeat=self._orders.heartbeat())
                messages.append(beaten)
                beat = time.monotonic()
            if not messages:
                continue
            self._writing = True
            try:
                async with asyncio.timeout(self._times.silence_s):
                    await _write(call, messages)
            except BaseException:
                self._outbox.put_back(taken)
                raise
            finally:
                self._writing = False
            self._sent.set()


async def _write(call: _Call, messages: list[scheduler_pb2.AgentMessage]) -> None:
    try:
        await call.write(scheduler_pb2.AgentMessages(messages=messages))
    except asyncio.InvalidStateError as error:
        raise Unavailable("the stream has ended") from error


async def _read(call: _Call) -> scheduler_pb2.SchedulerToAgentMessages:
    received = await call.read()
    if received is grpc.aio.EOF:
        raise Unavailable("the scheduler ended the stream")
    if isinstance(received, InvalidMessage):
        raise received
    assert isinstance(received, scheduler_pb2.SchedulerToAgentMessages)
    return received


async def _first_failure(*endless: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines side by side until one raises, and raises that.

    This is no TaskGroup: before Python 3.12, one that is cancelled while a child fails raises the
    failure and swallows the cancellation, and `run` would never end.
    """
    tasks = [asyncio.ensure_future(each) for each in endless]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                # gRPC cancels a writer when the reader gives up the call at the same moment.
                raise Unavailable("the stream was given up")
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing() -> None:
    """Default for callbacks that have nothing to do."""


def _describe(error: BaseException) -> str:
    """Returns the cause of an error without gRPC's page of debug text."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
