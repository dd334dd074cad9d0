"""The stream to the leading scheduler: hello, orders down, reports up.

The addresses are tried one after another until a scheduler sends a welcome; a standby refuses with
UNAVAILABLE. The loss of the stream does not affect the data plane: batches continue, and reports
wait in the outbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from catenary_agent.engine.reporting import FixedMessage
from catenary_agent.outbox import Outbox
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.control.connecting import Heartbeats, open_stream
from catenary_services.control.control_stream import ControlStream, SchedulerEnd
from catenary_services.domain.groups import EPOCH_FIELD, is_epoch
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    StaleEpoch,
    Unavailable,
)
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.log import get_logger
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity

_log = get_logger("catenary_agent.control")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.4
_PACK = 1_024
"""The most messages in one write."""
_FLUSH_LOOK_S = 0.005


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

    def hear_clock(self, clock_ns: int) -> None:
        """Takes in what the leader's clock showed when a message was sent; 0: it does not say."""
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


class SchedulerLink:
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

        `metadata` names the scheduler group of the agent, if there are several.
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
        self._stream: ControlStream | None = None

    async def run(self) -> None:
        """Keeps connecting until cancelled."""
        pause_s = _FIRST_PAUSE_S
        for address in cycle(self._addresses):
            try:
                await self._session(address)
            except CatenaryError as error:
                _log.info("scheduler_away", address=address, error=error.message)
                self._forget_if_told(error)
                if isinstance(error, InvalidMessage):
                    # Another scheduler may lead now or later; no tight loop around this one.
                    self.connected.clear()
                    pause_s = _LONGEST_PAUSE_S
            except Exception:
                # A bug in carrying out one order must not end the agent; a new stream may work.
                _log.error("scheduler_stream_failed", address=address, exc_info=True)
            if self.connected.is_set():
                self.connected.clear()
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def _forget_if_told(self, error: CatenaryError) -> None:
        """Forgets the epoch if the leader says that it is impossible, after damage or deceit.

        A leader that is merely stale does not say so: its epoch is close to the agent's.
        """
        if isinstance(error, InvalidInput) and error.details.get("field") == EPOCH_FIELD:
            _log.warning("epoch_forgotten", epoch=self._orders.epoch)
            self._orders.forget_epoch()
            self.leader = ""

    async def flush(self, timeout_s: float) -> bool:
        """Returns True once everything queued so far was sent, False after `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # Nothing says when the kernel has taken the last byte.
                while len(self._outbox) or self._unsent_bytes:  # noqa: ASYNC110
                    await asyncio.sleep(_FLUSH_LOOK_S)
                return True
        return False

    @property
    def _unsent_bytes(self) -> int:
        return self._stream.unsent_bytes if self._stream is not None else 0

    async def _session(self, address: str) -> None:
        """Exchanges messages with one scheduler until the stream ends; always raises the reason."""
        session = _Session(self, address)
        channel = open_channel(address, self._security, role=Role.SCHEDULER)
        try:
            await open_stream(
                session.end.stream,
                address,
                channel,
                Role.AGENT,
                self._security,
                self._metadata,
                timeout_s=self._times.silence_s,
            )
        except BaseException:
            session.end.stream.abort()
            raise
        finally:
            await channel.close()
        self._stream = session.end.stream
        session.write([scheduler_pb2.AgentMessage(hello=self._orders.hello())])
        times = self._times
        heartbeats = Heartbeats(
            session.end.stream, session.beat, times.heartbeat_s, times.silence_s
        )
        try:
            await session.end.over
        finally:
            heartbeats.stop()
            self._outbox.rest()
            session.end.stream.abort()

    def greeted(self, welcome: scheduler_pb2.SchedulerToAgentMessage, session: _Session) -> None:
        """Judges the scheduler by its first message, and sends it reports from then on.

        Raises:
            Unavailable: The message is no welcome.
            StaleEpoch: The scheduler is a former leader.
            InvalidInput: Its epoch is impossible.
        """
        address = session.address
        if welcome.WhichOneof("kind") != "welcome":
            raise Unavailable(f"{address} answered hello with something else than welcome")
        epoch = max(welcome.epoch, welcome.welcome.epoch)
        if self._is_stale(epoch, welcome.welcome.leader):
            self._orders.refused()
            session.write([self._refusal(epoch)])
            raise StaleEpoch(f"{address} leads epoch {epoch}; {self._orders.epoch} was seen")
        if not is_epoch(epoch):
            raise InvalidInput("welcome.epoch", f"{address} says {epoch}, which is no epoch")
        self._orders.raise_epoch(epoch)
        self.leader = welcome.welcome.leader
        _log.info("scheduler_found", scheduler=welcome.welcome.scheduler_id, epoch=epoch)
        self.connected.set()
        self._outbox.serve(session.send)

    def _is_stale(self, epoch: int, leader: str) -> bool:
        """Returns True for a former leader, and for a second one with the present epoch.

        Two schedulers have the same epoch if Redis forgot that it had granted it (a promoted
        replica lacked the last writes). The one that is met second raises its epoch and connects
        again.
        """
        if epoch != self._orders.epoch:
            return epoch < self._orders.epoch
        return bool(leader and self.leader) and leader != self.leader

    def ordered(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        """Has an order of the present leader carried out, and refuses one of a former leader.

        Raises:
            InvalidInput: The order has an impossible epoch.
        """
        kind = message.WhichOneof("kind")
        if kind in (None, "heartbeat"):
            if kind and message.epoch == self._orders.epoch:
                self._orders.hear_clock(message.heartbeat.clock_ns)
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

    def taken(self) -> list[scheduler_pb2.AgentMessage]:
        """Returns the next messages to the scheduler, as of now."""
        return [each.message() for each in self._outbox.take(_PACK)]

    def heartbeat(self) -> scheduler_pb2.AgentMessage:
        """Returns a heartbeat, as of now."""
        return scheduler_pb2.AgentMessage(heartbeat=self._orders.heartbeat())


class _Session:
    """One stream to a scheduler, and what is sent over it."""

    def __init__(self, link: SchedulerLink, address: str) -> None:
        self._link = link
        self.address = address
        self._is_greeted = False
        self.end = SchedulerEnd(
            scheduler_pb2.SchedulerToAgentMessages, self._take, self.send, link.invalid
        )

    def _take(self, pack: scheduler_pb2.SchedulerToAgentMessages) -> None:
        """Takes in the welcome, then orders."""
        orders: Iterable[scheduler_pb2.SchedulerToAgentMessage] = pack.messages
        if not self._is_greeted:
            first, *orders = pack.messages or [scheduler_pb2.SchedulerToAgentMessage()]
            self._link.greeted(first, self)
            self._is_greeted = True
        for order in orders:
            self._link.ordered(order)

    def send(self) -> None:
        """Sends what waits in the outbox, unless the scheduler reads too slowly."""
        if self._may_send and (messages := self._link.taken()):
            self.write(messages)

    def beat(self) -> None:
        """Sends a heartbeat, with what waits in the outbox."""
        if self._may_send:
            self.write([*self._link.taken(), self._link.heartbeat()])

    @property
    def _may_send(self) -> bool:
        stream = self.end.stream
        return self._is_greeted and not stream.is_full and not stream.closed

    def write(self, messages: list[scheduler_pb2.AgentMessage]) -> None:
        """Writes messages as one pack, whether the scheduler has read the last ones or not."""
        self.end.write(scheduler_pb2.AgentMessages(messages=messages))


def _nothing() -> None:
    """Default for callbacks that have nothing to do."""
