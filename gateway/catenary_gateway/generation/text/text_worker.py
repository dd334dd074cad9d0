"""The gateway's side of the process that runs one model's templates and tokenizer.

Orders are sent as they come and answered in their order. A process that takes too long, ends or
says what makes no sense is ended. The order it was at fails, and so may the model for a while; the
other orders go to the next process, and other models have processes of their own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from catenary_gateway.generation.text.jailed.orders import (
    ANSWER_HEADER,
    ORDER_HEADER,
    AnswerKind,
    TextDescription,
    TextFiles,
    TextRefusal,
)
from catenary_services.errors import CatenaryError, InvalidInput, NoActivePlan, Overloaded
from catenary_services.jail.orders import JailLimit, JailLimits, JailOrder
from catenary_services.jail.resident import ResidentProcess
from catenary_services.log import get_logger

_TARGET = "catenary_gateway.generation.text.jailed.serving:serve"
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4"}
_MOST_WAITING = 1024
_TRIES = 3
"""Processes that an order is given to which did not fail because of it."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_FORGIVEN_S = 300.0
"""A model that has not failed for so long begins anew."""
_RETRY_NS = 500_000_000

_log = get_logger("catenary_gateway.generation")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The most that one order may take of the process that runs a model's templates."""

    cpu_s: float = 0.05
    cpu_s_per_byte: float = 5e-6
    """Further processor time for each byte of the order. Encoding a byte takes 0.5 to 1 us."""
    load_cpu_s: float = 3.0
    load_cpu_s_per_byte: float = 2e-6
    """The same for reading a model's files, which takes 0.1 us."""
    wall_clock_s: float = 10.0
    """Seconds until the answer, on a machine that may be busy."""
    wall_clock_per_cpu: float = 10.0
    """Further seconds for each second of processor time that it may take."""
    start_s: float = 120.0
    """Seconds for the process to begin."""
    answer_bytes: int = 1 << 20
    answer_bytes_per_byte: int = 32
    memory_bytes: int = 4 << 30
    """Address space of the process whatever it works on. Each order has a tighter limit, which
    grows with it from 256 MiB on."""


USUAL_LIMITS = TextLimits()


class TextWorkerError(Exception):
    """The process ended at an order; the limit says why."""

    def __init__(self, limit: JailLimit, *, is_at_fault: bool) -> None:
        super().__init__(limit)
        self.limit = limit
        self.is_at_fault = is_at_fault
        """False for an order that only waited behind the one it ended at."""


@dataclass(slots=True)
class _Waiting:
    answer: asyncio.Future[tuple[AnswerKind, bytes]]
    wall_clock_s: float
    most_bytes: int


class TextWorker:
    """The process of one model: it is started when it is needed, and again after it ended."""

    def __init__(
        self,
        model: str,
        read: Callable[[], TextFiles],
        starts: asyncio.Semaphore,
        limits: TextLimits = USUAL_LIMITS,
    ) -> None:
        """Starts nothing yet.

        Args:
            model: The model, as errors name it.
            read: Reads its files; called on a thread.
            starts: Held while a process is started, so that many at a time cannot take the machine.
            limits: The limits of orders.
        """
        self._model = model
        self._read = read
        self._starts = starts
        self._limits = limits
        self._live: _Conversation | None = None
        self._starting: asyncio.Task[_Conversation] | None = None
        self._failures = 0
        self._failed_s = 0.0
        self._limit: JailLimit | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._live.process.pid if self._live is not None else None

    async def describe(self) -> TextDescription:
        """Starts the process, if there is none, and returns what it says of the model.

        Raises:
            NoActivePlan: The model's files cannot be used.
            ValueError: They are malformed.
            OSError: They cannot be read, or no process can be started.
            CatenaryError: They cannot be read.
        """
        live = self._live or await self._started()
        return live.described

    async def call(self, order: bytes, more_cpu_s: float = 0.0) -> bytes:
        """Returns the answer to an encoded order.

        Args:
            order: The order.
            more_cpu_s: Processor time that it may take beyond what its size allows it.

        Raises:
            InvalidInput: The conversation or text is refused.
            NoActivePlan: The model's files fail at it, or have failed too often.
            Overloaded: Too many wait already.
        """
        limits = self._limits
        cpu_s = limits.cpu_s + limits.cpu_s_per_byte * len(order) + more_cpu_s
        most_bytes = limits.answer_bytes + limits.answer_bytes_per_byte * len(order)
        for _ in range(_TRIES):
            try:
                live = self._live or await self._restarted()
                kind, answer = await live.ask(order, cpu_s, most_bytes)
            except TextWorkerError as error:
                if error.is_at_fault:
                    raise self._error(error.limit) from None
                continue
            if kind is AnswerKind.RESULT:
                return answer
            if kind is AnswerKind.REFUSAL:
                raise self._refused(answer)
            raise unusable(self._model, answer.decode(errors="replace"))
        raise Overloaded(f"model {self._model} is asked what ends it", retry_after_ns=_RETRY_NS)

    async def close(self) -> None:
        """Ends the process, if there is one, and lets none begin."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        live, self._live = self._live, None
        if live is not None:
            live.process.kill()
            await live.ended

    async def _restarted(self) -> _Conversation:
        """Returns a process for files that could be read before.

        Raises:
            NoActivePlan: Now they cannot, or have failed too often.
        """
        try:
            return await self._started()
        except NoActivePlan:
            raise
        except (OSError, ValueError, CatenaryError) as error:
            raise unusable(self._model, str(error)) from error

    async def _started(self) -> _Conversation:
        if self._starting is None:
            self._require_chance()
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._has_started)
        # A caller that is cancelled must not cancel the start that others wait for.
        return await asyncio.shield(self._starting)

    def _has_started(self, task: asyncio.Task[_Conversation]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is None:
            self._live = task.result()
            if self._live.ended.done():
                self._live = None

    async def _start(self) -> _Conversation:
        limits = self._limits
        files = await asyncio.to_thread(self._read)
        content = msgspec.msgpack.encode(files)
        async with self._starts:
            order = JailOrder(
                target=_TARGET,
                imports=("tokenizers", "jinja2"),
                job=b"",
                inputs=(),
                limits=JailLimits(
                    # What counts is the time of each order.
                    cpu_s=1 << 31,
                    memory_bytes=limits.memory_bytes,
                    file_bytes=0,
                ),
            )
            process = await _process_of(order)
            conversation = _Conversation(process, self._has_ended)
            await asyncio.get_running_loop().create_unix_connection(
                lambda: conversation, sock=process.channel
            )
            try:
                await self._load(conversation, content, files.nbytes)
            except BaseException:
                process.kill()
                await conversation.ended
                raise
        return conversation

    async def _load(self, conversation: _Conversation, content: bytes, nbytes: int) -> None:
        limits = self._limits
        cpu_s = limits.load_cpu_s + limits.load_cpu_s_per_byte * nbytes
        most_bytes = 2 * limits.answer_bytes + 2 * nbytes
        wall_clock_s = limits.start_s + self._wall_clock_s(cpu_s)
        try:
            kind, answer = await conversation.ask(content, cpu_s, most_bytes, wall_clock_s)
            if kind is not AnswerKind.RESULT:
                self._count_failure(None)
                raise ValueError(answer.decode(errors="replace"))
            conversation.described = msgspec.msgpack.decode(answer, type=TextDescription)
        except msgspec.MsgspecError as error:
            self._count_failure(None)
            raise ValueError(str(error)) from None
        except TextWorkerError as error:
            self._count_failure(error.limit)
            raise self._error(error.limit) from None
        conversation.wall_clock_s = self._wall_clock_s

    def _wall_clock_s(self, cpu_s: float) -> float:
        return self._limits.wall_clock_s + self._limits.wall_clock_per_cpu * cpu_s

    def _has_ended(self, conversation: _Conversation, limit: JailLimit) -> None:
        """Counts the end of a process that had read its model; others end with their start."""
        if conversation is self._live:
            self._live = None
            self._count_failure(limit)

    def _count_failure(self, limit: JailLimit | None) -> None:
        now_s = time.monotonic()
        self._failures = self._failures + 1 if now_s < self._failed_s + _FORGIVEN_S else 1
        self._failed_s, self._limit = now_s, limit
        if limit is not None:
            _log.warning("text_worker_ended", model=self._model, limit=str(limit))

    def _require_chance(self) -> None:
        """Raises NoActivePlan while a model that fails again and again is left alone."""
        if self._closed:
            raise unusable(self._model, "the gateway stops")
        left_s = self._failed_s + delay_s(self._failures) - time.monotonic()
        if self._failures and left_s > 0:
            raise self._error(self._limit, left_s)

    def _error(self, limit: JailLimit | None, left_s: float = 0.0) -> NoActivePlan:
        error = unusable(self._model, _WORDS_OF[limit])
        if limit is not None:
            error.details["limit"] = limit
        if left_s:
            error.retry_after_ns = int(left_s * 1e9)
        return error

    def _refused(self, answer: bytes) -> InvalidInput | NoActivePlan:
        try:
            refusal = msgspec.msgpack.decode(answer, type=TextRefusal)
        except msgspec.MsgspecError:
            return unusable(self._model, _WORDS_OF[JailLimit.RESULT])
        return InvalidInput(refusal.field, refusal.message)


_WORDS_OF: dict[JailLimit | None, str] = {
    None: "they are malformed",
    JailLimit.CPU_TIME: "they take more processor time than they may",
    JailLimit.WALL_CLOCK: "they take longer than they may",
    JailLimit.MEMORY: "they take more memory than they may",
    JailLimit.RESULT: "they make much of little",
    JailLimit.CRASH: "they bring down what reads them",
}


async def _process_of(order: JailOrder) -> ResidentProcess:
    """Returns a new process, which none is left of where the caller is cancelled."""
    starting = asyncio.ensure_future(asyncio.to_thread(ResidentProcess, order, _ENVIRONMENT))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        process.channel.close()
        process.kill()
        await asyncio.to_thread(process.end)
        raise


def unusable(model: str, why: str) -> NoActivePlan:
    """Returns the error of a model whose tokenizer or templates cannot be used."""
    return NoActivePlan(
        f"model {model} cannot be asked here: its tokenizer files cannot be used: {why[:400]}",
        details={"model": model},
    )


def delay_s(failures: int) -> float:
    """Returns how long a model is left alone that has failed so often: not at first."""
    if failures < 2:
        return 0.0
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(failures - 2, 16)))


class _Conversation(asyncio.Protocol):
    """The orders and answers of one process, from its start to its end."""

    described: TextDescription

    def __init__(
        self, process: ResidentProcess, has_ended: Callable[[_Conversation, JailLimit], None]
    ) -> None:
        self.process = process
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.wall_clock_s: Callable[[float], float] = lambda cpu_s: cpu_s
        self._has_ended = has_ended
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._limit: JailLimit | None = None
        self._due: asyncio.TimerHandle | None = None
        self._burial: asyncio.Task[None] | None = None

    async def ask(
        self, order: bytes, cpu_s: float, most_bytes: int, wall_clock_s: float = 0.0
    ) -> tuple[AnswerKind, bytes]:
        """Returns the answer to an order.

        Raises:
            TextWorkerError: The process ended before it answered.
            Overloaded: Too many wait already.
        """
        if self._transport is None or self._transport.is_closing():
            await asyncio.shield(self.ended)
            raise TextWorkerError(JailLimit.CRASH, is_at_fault=False)
        if len(self._waiting) >= _MOST_WAITING:
            raise Overloaded("too many texts wait to be encoded", retry_after_ns=_RETRY_NS)
        answer: asyncio.Future[tuple[AnswerKind, bytes]] = self._loop.create_future()
        wall_clock_s = wall_clock_s or self.wall_clock_s(cpu_s)
        self._waiting.append(_Waiting(answer, wall_clock_s, most_bytes))
        if len(self._waiting) == 1:
            self._watch_first()
        self._transport.writelines((ORDER_HEADER.pack(len(order), int(cpu_s * 1e6)), order))
        return await answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to speak; asyncio calls it."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Takes a piece of answers; asyncio calls it."""
        unread = self._unread
        unread += data
        while len(unread) >= ANSWER_HEADER.size and self._limit is None:
            size, kind = ANSWER_HEADER.unpack_from(unread)
            if not self._waiting or kind > AnswerKind.END or size > self._waiting[0].most_bytes:
                self._end(JailLimit.RESULT)
                return
            end = ANSWER_HEADER.size + size
            if len(unread) < end:
                return
            content = bytes(unread[ANSWER_HEADER.size : end])
            del unread[:end]
            if kind == AnswerKind.END:
                is_memory = content == JailLimit.MEMORY.encode()
                self._end(JailLimit.MEMORY if is_memory else JailLimit.CRASH)
                return
            first = self._waiting.popleft()
            self._watch_first()
            if not first.answer.done():
                first.answer.set_result((AnswerKind(kind), content))

    def connection_lost(self, exc: Exception | None) -> None:
        """Finds out why the process ended; asyncio calls it."""
        if self._due is not None:
            self._due.cancel()
        self._burial = self._loop.create_task(self._bury())

    def _watch_first(self) -> None:
        """Begins the time of the order that the process is at."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._waiting:
            wall_clock_s = self._waiting[0].wall_clock_s
            self._due = self._loop.call_later(wall_clock_s, self._end, JailLimit.WALL_CLOCK)

    def _end(self, limit: JailLimit) -> None:
        self._limit = self._limit or limit
        self._unread.clear()
        self.process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def _bury(self) -> None:
        code = await asyncio.to_thread(self.process.end)
        by_signal = {-signal.SIGPROF: JailLimit.CPU_TIME, -signal.SIGXCPU: JailLimit.CPU_TIME}
        limit = self._limit or by_signal.get(code, JailLimit.CRASH)
        self._has_ended(self, limit)
        is_at_fault = True
        while self._waiting:
            each = self._waiting.popleft()
            if not each.answer.done():
                each.answer.set_exception(TextWorkerError(limit, is_at_fault=is_at_fault))
            is_at_fault = False
        self.ended.set_result(None)
