"""The outer side of the jail: starts work, reads its messages, ends it in time, takes its files."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from catenary_services.errors import CatenaryError, InternalError, InvalidInput, error_of_reason
from catenary_services.jail import process
from catenary_services.jail.harvest import left_behind, take_over, used_bytes
from catenary_services.jail.orders import (
    JailAnswer,
    JailLimit,
    JailLimits,
    JailOrder,
    JailProgress,
    JailRefusal,
    Told,
)
from catenary_services.scratch import ScratchFolder

_LOOK_S = 0.25
"""Seconds between two checks of the time and of the files."""
_PIECE = 1 << 16
_WORDS_KEPT = 4096
_WORDS_SHOWN = 400
_AFTERWARDS_S = 5.0


@dataclass(frozen=True, slots=True)
class JailedWork:
    """A piece of work for the jail."""

    target: str
    """"module:function" in a package of this project; a `child.JailedWork`."""
    job: bytes
    subject: str
    """Name of the file in question in error messages."""
    imports: tuple[str, ...] = ()
    """Libraries the work needs."""
    inputs: tuple[Path, ...] = ()
    """Files and folders the work may read; the child gets them in this order."""
    wanted: tuple[str, ...] = ()
    """Files the work may leave, as patterns of `fnmatch`."""
    limits: JailLimits = field(default_factory=JailLimits)


def run_jailed(
    work: JailedWork, into: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> bytes:
    """Returns the result of the work, and moves the files it leaves into `into`.

    The result was made by a process that read a stranger's file; check it like anything from
    outside.

    Raises:
        CatenaryError: The error with which the work refuses the file.
        InvalidInput: A limit ended the work (`details["limit"]`), or it left files it should not.
        InternalError: The work failed in an unforeseen way; the message has its last output.
    """
    with ScratchFolder(process.FOLDER_PREFIX, into) as base:
        order = JailOrder(
            target=work.target,
            imports=work.imports,
            job=work.job,
            inputs=tuple(map(str, work.inputs)),
            limits=work.limits,
        )
        order = process.placed(order, base)
        with _Stay(work, order, progress) as stay:
            stay.listen()
        answer = stay.answer()
        files = left_behind(Path(order.output), work.limits, work.subject)
        if files and into is None:
            raise InternalError(f"{work.target} leaves files that nobody takes")
        if into is not None:
            take_over(Path(order.output), into, work.wanted, files)
        return answer


class _Stay:
    """One child process from its start to its end."""

    def __init__(self, work: JailedWork, order: JailOrder, progress: Callable[[str], None]) -> None:
        self._work = work
        self._order = order
        self._progress = progress
        self._deadline = time.monotonic() + work.limits.wall_clock_s
        self._told: JailAnswer | JailRefusal | None = None
        self._ended_for: JailLimit | None = None
        self._unread = bytearray()
        self._last_words = bytearray()
        self._printed = 0
        receiving, sending = os.pipe()
        self._messages = os.fdopen(receiving, "rb", buffering=0)
        try:
            self._process = process.start(order, sending, subprocess.PIPE)
        except BaseException:
            self._messages.close()
            raise
        finally:
            os.close(sending)

    def __enter__(self) -> _Stay:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills every process of the child."""
        process.end(self._order, self._process)
        self._messages.close()

    def listen(self) -> None:
        """Reads the child's messages until it has ended or was ended."""
        assert self._process.stdout is not None
        process.give(self._order, self._process)
        look_at = time.monotonic() + _LOOK_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._messages, selectors.EVENT_READ, self._hear)
            selector.register(self._process.stdout, selectors.EVENT_READ, self._overhear)
            while selector.get_map() and self._ended_for is None:
                for key, _ in selector.select(_LOOK_S):
                    piece = os.read(key.fd, _PIECE)
                    if not piece:
                        selector.unregister(key.fileobj)
                    key.data(piece)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_S
                    self._look()
                    if self._process.poll() is not None and not selector.select(0):
                        break
        if self._ended_for is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_AFTERWARDS_S)

    def answer(self) -> bytes:
        """Returns the answer of the child.

        Raises:
            CatenaryError: The child gave no answer.
        """
        if self._ended_for is not None:
            raise self._limit_error(self._ended_for)
        if isinstance(self._told, JailAnswer):
            return self._told.result
        if isinstance(self._told, JailRefusal):
            raise self._refusal(self._told)
        code = self._process.returncode
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise self._limit_error(JailLimit.CPU_TIME)
        if code < 0:
            raise self._limit_error(JailLimit.CRASH, f"it ended by {signal.Signals(-code).name}")
        raise InternalError(
            f"reading {self._work.subject} failed with exit code {code}: {self._words()}"
        )

    def _hear(self, piece: bytes) -> None:
        # Only the new piece is searched, because an answer of many pieces is one line.
        *ended, rest = piece.split(b"\n")
        lines = []
        for each in ended:
            lines.append(bytes(self._unread + each))
            self._unread.clear()
        self._unread += rest
        # The answer is base64 in JSON: a third longer than its bytes.
        if len(self._unread) > 2 * self._work.limits.result_bytes:
            self._ended_for = JailLimit.RESULT
        for line in lines:
            try:
                message: Told = msgspec.json.decode(line, type=Told)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if isinstance(message, JailProgress):
                self._progress(message.text[:_WORDS_SHOWN])
            elif isinstance(message, JailAnswer) and len(message.result) > (
                self._work.limits.result_bytes
            ):
                self._ended_for = JailLimit.RESULT
            else:
                self._told = message

    def _overhear(self, piece: bytes) -> None:
        self._printed += len(piece)
        self._last_words = (self._last_words + piece)[-_WORDS_KEPT:]
        if self._printed > self._work.limits.printed_bytes:
            self._ended_for = JailLimit.OUTPUT

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            self._ended_for = JailLimit.WALL_CLOCK
        for folder in (self._order.output, self._order.scratch):
            if used_bytes(Path(folder)) > self._work.limits.folder_bytes:
                self._ended_for = JailLimit.FILES

    def _words(self) -> str:
        return " ".join(self._last_words.decode(errors="replace").split())[-_WORDS_SHOWN:]

    def _refusal(self, told: JailRefusal) -> CatenaryError:
        if told.message == "MemoryError" or _is_about_memory(told.message):
            return self._limit_error(JailLimit.MEMORY)
        if not told.reason:
            words = self._words()
            return InternalError(
                f"reading {self._work.subject} failed: {told.message[:_WORDS_SHOWN]}"
                + (f" .. {words}" if words else "")
            )
        facts = {"field": told.field} if told.field else {}
        return error_of_reason(told.reason, told.message[:_WORDS_KEPT], details=facts)

    def _limit_error(self, limit: JailLimit, more: str = "") -> InvalidInput:
        limits = self._work.limits
        says = {
            JailLimit.WALL_CLOCK: f"took longer than {limits.wall_clock_s:g} s and was ended",
            JailLimit.CPU_TIME: f"took more than {limits.cpu_s} s of CPU time and was ended",
            JailLimit.MEMORY: f"wanted more than {limits.memory_bytes} bytes of memory",
            JailLimit.OUTPUT: f"printed more than {limits.printed_bytes} bytes and was ended",
            JailLimit.RESULT: f"answered more than {limits.result_bytes} bytes and was ended",
            JailLimit.FILES: f"wrote more than {limits.folder_bytes} bytes and was ended",
            JailLimit.CRASH: f"brings down what reads it: {more}",
        }
        error = InvalidInput(self._work.subject, says[limit])
        error.details["limit"] = limit
        return error


def _is_about_memory(text: str) -> bool:
    lower = text.lower()
    return any(
        each in lower
        for each in (
            "can't allocate memory",
            "bad_alloc",
            "cannot allocate memory",
            "unable to allocate",
            "failed to allocate memory",
        )
    )
