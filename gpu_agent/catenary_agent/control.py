"""The stream to the scheduler that leads: hello, orders down, reports up.

The stream is opened to one of the addresses after another until one welcomes us; a standby refuses
with UNAVAILABLE. Losing it changes nothing on the data plane: batches go on, and what is to be
reported waits in the outbox.
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

from catenary_agent.engine.reporting import Notice
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
from catenary_services.rules.reading import checking
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity

_log = get_logger("catenary_agent.control")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.4
_PACK = 1_024
"""Most messages in one write."""

_Call = Any  # grpc.aio.StreamStreamCall; its stubs do not know our messages


class Orders(Protocol):
    """Carries out what the scheduler orders. Called on the loop; must not block."""

    @property
    def epoch(self) -> int:
        """Highest epoch seen."""
        ...

    def raise_epoch(self, epoch: int) -> None:
        """Obeys nobody below `epoch` from now on."""
        ...

    def forget_epoch(self) -> None:
        """Obeys the next leader, whatever its epoch: the one obeyed so far cannot be true."""
        ...

    def hello(self) -> scheduler_pb2.AgentHello:
        """Returns who we are and what we hold, as of now."""
        ...

    def obey(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        """Carries out one order of the leader."""
        ...

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """Returns what we compute, as of now."""
        ...

    def refused(self) -> None:
        """Notes that an order of a former leader was refused."""
        ...


@dataclass(frozen=True, slots=True)
class ControlTimes:
    """How often to speak and how long to listen."""

    heartbeat_s: float = 1.0
    silence_s: float = 3.0


class Control:
    """Keeps a session with whichever scheduler leads."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        orders: Orders,
        outbox: Outbox,
        times: ControlTimes | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Sends what is put into `outbox`, gives orders to `orders`.

        `metadata` goes with the stream: the scheduler group we belong to, if there are several.
        """
        self._addresses = list(addresses)
        self._security = security
        self._orders = orders
        self._outbox = outbox
        self._times = times or ControlTimes()
        self._metadata = tuple(metadata)
        self.connected = asyncio.Event()
        """Set while a leader has welcomed us."""
        self.invalid: Callable[[], None] = _nothing
        """Called for each message of a scheduler that says what cannot be."""
        self.leader = ""
        """Which start of a scheduler has the highest epoch seen."""
        self._sent = asyncio.Event()
        self._writing = False

    async def run(self) -> None:
        """Keeps connecting until cancelled."""
        pause_s = _FIRST_PAUSE_S
        for address in cycle(self._addresses):
            try:
                await self._session(address)
            except InvalidMessage as error:
                # Perhaps another one leads, or will; this one is not worth a tight loop.
                self.invalid()
                _log.warning("scheduler_unbelievable", address=address, why=error.message)
                self.connected.clear()
                pause_s = _LONGEST_PAUSE_S
            except (CatenaryError, grpc.aio.AioRpcError, OSError) as error:  # with TimeoutError
                _log.info("scheduler_away", address=address, error=_describe(error))
                self._forget_if_told(error)
            except Exception:
                # A bug in carrying out one order must not end the agent; a new stream may do.
                _log.error("scheduler_stream_failed", address=address, exc_info=True)
            if self.connected.is_set():
                self.connected.clear()
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def _forget_if_told(self, error: BaseException) -> None:
        """Drops an epoch that the leader says cannot be: it came from a damaged store, or a liar.

        A leader that is merely stale does not say so: its epoch is close to ours.
        """
        said = error_of_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
        if isinstance(said, InvalidInput) and said.details.get("field") == EPOCH_FIELD:
            _log.warning("epoch_forgotten", epoch=self._orders.epoch)
            self._orders.forget_epoch()
            self.leader = ""

    async def flush(self, timeout_s: float) -> bool:
        """Returns True once everything queued so far was sent, False if that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._outbox) or self._writing:
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            return False
        return True

    async def _session(self, address: str) -> None:
        """Talks to one scheduler until the stream ends. Always raises why it ended."""
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
        """Says hello and waits to be welcomed."""
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
        """True for a former leader, and for a second one of the epoch that we obey already.

        Two have the same epoch if Redis forgot that it had granted it (a replica was promoted
        that lacked the last writes); the one we meet second goes beyond it and comes again.
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
            self._outbox.put(Notice(self._refusal(epoch)))
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
        """Sends what is queued, everything at once, and a heartbeat when one is due."""
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

    Not a TaskGroup: until Python 3.12 one that is cancelled while a child fails raises the failure
    and swallows the cancellation, and `run` would go on for ever.
    """
    tasks = [asyncio.ensure_future(each) for each in endless]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                # gRPC says so to a writer whose call the reader gave up at the same moment.
                raise Unavailable("the stream was given up")
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing() -> None:
    """Nobody counts."""


def _describe(error: BaseException) -> str:
    """Returns the cause without gRPC's page of debug text."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
