"""Tries out grammars before agents are given them, in a process that may be ended.

Grammars come from strangers. The engine limits the work of compiling one, and this process bounds
what the engine may overlook: processor time, memory, a crash. What was found out is remembered, as
most clients send the same few grammars again and again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from catenary_gateway.generation.grammar.checking_child import KEPT, GrammarAnswer, GrammarOrder
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, Overloaded
from catenary_services.log import get_logger

_MODULE = "catenary_gateway.generation.grammar.checking_child"
_KNOWN = 1024
"""Number of grammars whose result is remembered."""
_MOST_WAITING = 16
_RETRY_NS = 500_000_000
_LONGEST_ANSWER_BYTES = 1 << 20
_LATE = "no grammar can be compiled at the moment"
_AVOIDED_S = 60.0
_UNREADABLE = GrammarAnswer("needs a tokenizer that can be used: reading this one takes too much")
_ITS_OWN_FAULT = {-each for each in (signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)}
"""The exit codes of a process that a grammar or a vocabulary has ended."""

_log = get_logger("catenary_gateway.generation")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The most that trying out one grammar may take."""

    cpu_s: int = 2
    """Seconds of processor time for compiling it and making its first mask."""
    memory_bytes: int = 2 << 30
    """Address space of the whole process."""
    wall_clock_s: float = 60.0
    """Seconds until the answer, with starting the process and reading a tokenizer, on a machine
    that may be busy."""


@dataclass(frozen=True, slots=True)
class GrammarModel:
    """A model that is to answer as a grammar says."""

    key: ModelKey
    tokenizer: Callable[[], str]
    """Reads its tokenizer.json; called on a thread."""
    size: int
    """Number of rows of the logits."""


class GrammarChecker:
    """Finds out whether answers can be made to match grammars, one grammar at a time."""

    def __init__(self, limits: GrammarLimits = GrammarLimits(), module: str = _MODULE) -> None:
        """Starts nothing before there is a grammar.

        Args:
            limits: The limits of one grammar.
            module: The module that is run; tests name others.
        """
        self._limits = limits
        self._module = module
        self._known: OrderedDict[tuple[ModelKey, bytes], GrammarAnswer] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._sent: list[ModelKey] = []
        """The models whose vocabularies the process has, as long as it keeps them."""
        self._avoided: dict[ModelKey, float] = {}
        """The monotonic times until which vocabularies that ended the process are not read."""

    async def check(
        self, model: GrammarModel, grammar: str, field: str, answer: Sequence[int] = ()
    ) -> str:
        """Returns a grammar in the form that agents know, if a model can be made to answer so.

        Args:
            model: The model.
            grammar: The grammar: in that form, or rules in EBNF.
            field: The field of the request that the grammar came from.
            answer: Tokens that the answer has already.

        Raises:
            InvalidInput: The grammar is wrong or takes too much, or the answer does not match it.
            Overloaded: Too many others wait for this already, or it takes too long.
        """
        name = (model.key, hashlib.sha256(grammar.encode()).digest())
        found = None if answer else self._known.get(name)
        if found is None:
            if self._waiting >= _MOST_WAITING:
                raise Overloaded("too many grammars are being compiled", retry_after_ns=_RETRY_NS)
            order = GrammarOrder(
                str(model.key), "", model.size, grammar, tuple(answer), self._limits.cpu_s
            )
            # A caller who goes away must not leave half an answer behind for the next one.
            found = await asyncio.shield(asyncio.ensure_future(self._ask(model, order)))
            if not answer:
                self._known[name] = found
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        if found.problem:
            raise InvalidInput(field, found.problem)
        return found.translated or grammar

    async def close(self) -> None:
        """Ends the process that tries grammars out, if there is one."""
        process, self._process = self._process, None
        self._sent.clear()
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _ask(self, model: GrammarModel, order: GrammarOrder) -> GrammarAnswer:
        """Returns what comes of trying a grammar out."""
        self._waiting += 1
        try:
            async with self._turn:
                try:
                    async with asyncio.timeout(self._limits.wall_clock_s):
                        return await self._answer(model, order)
                except BaseException:
                    await self.close()
                    raise
        except TimeoutError:
            raise Overloaded(_LATE, retry_after_ns=_RETRY_NS) from None
        finally:
            self._waiting -= 1

    async def _answer(self, model: GrammarModel, order: GrammarOrder) -> GrammarAnswer:
        if model.key not in self._sent:
            read = await self._introduced(model, order)
            if read.problem:
                return read
        found = await self._exchanged(order)
        if found is not None:
            return found
        limits = self._limits
        return GrammarAnswer(
            f"takes more than the {limits.cpu_s} s or the {limits.memory_bytes >> 20} MiB that"
            " compiling it may take"
        )

    async def _introduced(self, model: GrammarModel, order: GrammarOrder) -> GrammarAnswer:
        """Has the process read a model's vocabulary, and returns what is wrong with it.

        A vocabulary that ended the process is left alone for a while, since other models' grammars
        wait meanwhile.
        """
        if time.monotonic() < self._avoided.get(model.key, 0.0):
            return _UNREADABLE
        text = await asyncio.to_thread(model.tokenizer)
        bringing = msgspec.structs.replace(order, tokenizer=text, grammar="", answer=())
        read = await self._exchanged(bringing)
        if read is None:
            self._avoided[model.key] = time.monotonic() + _AVOIDED_S
            return _UNREADABLE
        if not read.problem:
            self._sent = [*self._sent, model.key][-KEPT:]
        return read

    async def _exchanged(self, order: GrammarOrder) -> GrammarAnswer | None:
        """Returns the process's answer to an order; None if the order has ended the process."""
        process = self._process = self._process or await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if line:
            return msgspec.json.decode(line, type=GrammarAnswer)
        code = await process.wait()
        await self.close()
        _log.warning("grammar_process_ended", model=order.model, exit_code=code)
        if code not in _ITS_OWN_FAULT:
            raise Overloaded(_LATE, retry_after_ns=_RETRY_NS)
        return None

    async def _started(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            str(self._limits.memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            limit=_LONGEST_ANSWER_BYTES,
        )
