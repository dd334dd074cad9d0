"""The thread that talks to an engine over its Unix socket: one request a session, many at a time.

Whatever the engine says is bounded: the bytes of a line, the tokens of an answer, their numbers. A
request has no time limit of its own; `rounds` tells the watchdog of the whole engine's progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import aiohttp
import uvloop
from aiohttp.http_exceptions import HttpProcessingError

from catenary_agent.engines.requests import (
    LARGEST_LINE_BYTES,
    LARGEST_PAGE_BYTES,
    EngineCapacity,
    EngineProtocol,
    EngineTokens,
)
from catenary_agent.generation.state.incidents import incident
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.engines.requests import AnswerParser, EngineRequest
    from catenary_agent.engines.streams import EngineStream

_HOST = "http://engine"
_JSON = {"Content-Type": "application/json"}
_CONNECT_S = 10.0
_PAGE_S = 10.0
_START_S = 10.0
_WORDS = 300
_BROKEN = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
"""The errors of a connection that breaks, or says what is no HTTP."""
_OK, _REFUSED, _FAILED = 200, 400, 500

T = TypeVar("T")
_Answering = AbstractAsyncContextManager[aiohttp.ClientResponse]


class StreamListener(Protocol):
    """A part that is told, on the client's thread, how streams go on."""

    def asked(self, stream: EngineStream) -> None:
        """Notes that the engine is being asked."""
        ...

    def came(self, stream: EngineStream, delta: EngineTokens, now_ns: int) -> None:
        """Takes tokens that have just come, one at least."""
        ...

    def over(self, stream: EngineStream, error: CatenaryError | None) -> None:
        """Notes that no further token comes, after an error if there was one."""
        ...


class EngineClient:
    """Asks an engine on a thread of its own. Any thread may call any method."""

    def __init__(
        self,
        socket: Path,
        protocol: EngineProtocol,
        vocabulary_size: int,
        end_token_ids: tuple[int, ...],
    ) -> None:
        """Asks nothing yet.

        Args:
            socket: The path of the engine's Unix socket.
            protocol: The protocol of the engine.
            vocabulary_size: Tokens of larger numbers are none.
            end_token_ids: The tokens that end a text.
        """
        self._socket = socket
        self._protocol = protocol
        self._vocabulary_size = vocabulary_size
        self._ends = end_token_ids
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[EngineStream, asyncio.Task[None]] = {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="engine-client", daemon=True)
        self._thread.start()

    # -- what other threads call -----------------------------------------------------------------

    def begin(self, stream: EngineStream, body: dict[str, Any], listener: StreamListener) -> None:
        """Asks for the tokens of a stream; returns at once."""
        self._loop.call_soon_threadsafe(self._begin, stream, body, listener)

    def abort(self, stream: EngineStream) -> None:
        """Takes no further token of a stream, and lets the engine forget it."""
        stream.is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all tasks with it
            self._loop.call_soon_threadsafe(self._abort, stream)

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls something on the thread after a delay; only what runs on the thread may ask."""
        return self._loop.call_later(delay_s, call)

    def is_serving(self) -> bool:
        """Returns True once the engine answers that it serves."""
        try:
            self._do(self._page(self._protocol.health_path))
        except (CatenaryError, TimeoutError):
            return False
        return True

    def capacity(self) -> EngineCapacity:
        """Returns what the engine keeps.

        Raises:
            PartitionLost: It does not say it.
        """
        return self._protocol.capacity(self._do(self._page(self._protocol.capacity_path)))

    def close(self) -> None:
        """Ends all requests without telling anybody. Idempotent."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        if not self._thread.is_alive():
            self._loop.close()

    # -- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_PAGE_S + _CONNECT_S)
        except TimeoutError:
            future.cancel()
            raise

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection that is used again may just have been closed by the engine.
                connector=aiohttp.UnixConnector(path=str(self._socket), limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                trust_env=False,
            )
        return self._session

    async def _page(self, path: str) -> bytes:
        try:
            async with (
                asyncio.timeout(_PAGE_S),
                self._open().get(_HOST + path, allow_redirects=False) as answer,
            ):
                page = await _read(answer, LARGEST_PAGE_BYTES)
        except _BROKEN as error:
            raise PartitionLost(f"the engine does not answer {path}: {error}") from None
        if answer.status != 200:
            raise PartitionLost(f"the engine answers {path} with {answer.status}")
        return page

    def _begin(self, stream: EngineStream, body: dict[str, Any], listener: StreamListener) -> None:
        if stream.is_closed:
            return
        task = self._loop.create_task(self._run(stream, body, listener))
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._tasks.pop(stream, None))

    def _abort(self, stream: EngineStream) -> None:
        task = self._tasks.get(stream)
        if task is not None:
            task.cancel()

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # -- one answer ------------------------------------------------------------------------------

    async def _run(
        self, stream: EngineStream, body: dict[str, Any], listener: StreamListener
    ) -> None:
        error: CatenaryError | None = None
        stream.asked_ns = time.monotonic_ns()
        listener.asked(stream)
        try:
            await self._answer(stream, body, listener)
        except CatenaryError as known:
            error = known
        except asyncio.CancelledError:
            error = PartitionLost("the session is over")
        except _BROKEN as broken:
            error = PartitionLost(f"the engine broke its answer off: {_words(broken)}")
        except Exception:
            error = incident("the engine's answer could not be read")
        stream.is_over = True
        listener.over(stream, error)

    async def _answer(
        self, stream: EngineStream, body: dict[str, Any], listener: StreamListener
    ) -> None:
        """Takes a whole answer in, and what it leaves unsaid at its end."""
        taken: list[int] = []
        request = stream.request
        async with contextlib.aclosing(self._deltas(request, body)) as deltas:
            async for delta in deltas:
                self._take(stream, delta, taken, listener)
                if delta.finish:
                    break
            else:
                raise PartitionLost("the engine ended its answer early")
        if delta.unsaid:
            known = [*request.token_ids, *taken]
            rest = replace(request, token_ids=known, most_tokens=delta.unsaid)
            self._take(stream, await self._whole(rest), taken, listener)
        if delta.finish == "length" and len(taken) < request.most_tokens:
            most = request.most_tokens
            raise PartitionLost(f"the engine generated {len(taken)} of {most} tokens, and no end")
        ends = {*self._ends, *request.parameters.stop_token_ids}
        if delta.finish == "stop" and not (taken and taken[-1] in ends):
            # It knows further tokens that end a text, which it may have kept to itself.
            if not self._ends or request.parameters.ignore_eos or len(taken) >= request.most_tokens:
                raise PartitionLost("the engine ended its answer, and does not say by which token")
            self._take(stream, EngineTokens(self._ends[:1]), taken, listener)

    def _take(
        self, stream: EngineStream, delta: EngineTokens, taken: list[int], listener: StreamListener
    ) -> None:
        tokens, scored = delta.token_ids, delta.scored
        if not tokens:
            return
        if len(taken) + len(tokens) > stream.request.most_tokens:
            raise PartitionLost(
                f"the engine generates more than {stream.request.most_tokens} tokens"
            )
        if max(tokens) >= self._vocabulary_size:
            raise PartitionLost(f"the engine says {max(tokens)}, which is no token of the model")
        now_ns = time.monotonic_ns()
        for place, token in enumerate(tokens):
            taken.append(token)
            stream.tokens.append((token, scored[place] if place < len(scored) else None))
        listener.came(stream, delta, now_ns)

    async def _deltas(
        self, request: EngineRequest, body: dict[str, Any]
    ) -> AsyncGenerator[EngineTokens]:
        parser = self._protocol.parser(request)
        async with self._post(body) as answer:
            await _check_status(answer)
            rest = b""
            # Lines that came together cost one wait: an engine sends two for each token, and often
            # the tokens of several.
            async for part in answer.content.iter_any():
                lines, rest = _split(rest + part)
                for line in lines:
                    yield parser.take(line)
            if rest:
                yield parser.take(rest)

    async def _whole(self, request: EngineRequest) -> EngineTokens:
        """Returns an answer that comes in one piece."""
        body = self._protocol.body(request, whole=True)
        parser: AnswerParser = self._protocol.parser(request)
        async with self._post(body) as answer:
            await _check_status(answer)
            return parser.take(await _read(answer, LARGEST_LINE_BYTES))

    def _post(self, body: dict[str, Any]) -> _Answering:
        url = _HOST + self._protocol.path
        return self._open().post(
            url, data=json.dumps(body).encode(), headers=_JSON, allow_redirects=False
        )


def _split(text: bytes) -> tuple[list[bytes], bytes]:
    """Returns the complete lines of a text without their ends, and what is behind them.

    Raises:
        PartitionLost: What is behind them is too long for a line.
    """
    *lines, rest = text.split(b"\n")
    if len(rest) > LARGEST_LINE_BYTES:
        raise PartitionLost(f"the engine sends a line of more than {LARGEST_LINE_BYTES} bytes")
    return [line.strip() for line in lines], rest


async def _read(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Returns all of an answer.

    Raises:
        PartitionLost: It is longer.
    """
    content = b""
    async for part in answer.content.iter_any():
        content += part
        if len(content) > most_bytes:
            raise PartitionLost(f"the engine sends more than {most_bytes} bytes in one piece")
    return content


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    """Raises an error if the engine refuses a request: our mistake or the client's, or its own."""
    if answer.status == _OK:
        return
    text = _words((await _read(answer, LARGEST_LINE_BYTES)).decode(errors="replace"))
    if _REFUSED <= answer.status < _FAILED:
        raise InvalidInput("engine", f"refuses the request: {text}")
    raise PartitionLost(f"the engine answers with {answer.status}: {text}")


def _words(said: object) -> str:
    return " ".join(str(said).split())[:_WORDS]
