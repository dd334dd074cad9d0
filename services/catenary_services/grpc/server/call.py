"""One call on its course from headers to status."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from catenary_services import errors
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.grpc.error_details import public_message
from catenary_services.grpc.error_tables import grpc_code, trailing_metadata
from catenary_services.grpc.server.answer_writer import AnswerWriter
from catenary_services.grpc.server.call_context import CallContext, CallerFacts
from catenary_services.grpc.server.incoming import PREFIX_BYTES, IncomingMessages
from catenary_services.grpc.server.methods import ServedMethod
from catenary_services.grpc.server.request_head import RequestHead
from catenary_services.grpc.server.response_blocks import Pair
from catenary_services.http2.stream import ServerStream
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_services.grpc.server.call_policy import CallAuthorizer
    from catenary_services.grpc.server.receiving_budget import ReceivingBudget
    from catenary_services.http2.connection import ServerConnection
    from catenary_services.http2.limits import ConnectionLimits

_WRITE_AHEAD_BYTES = 64 * 1024
"""Bytes that may wait for the caller before a handler that writes more has to wait."""
_REFUSED_S = 0.1
"""The longest time for which the status of a stream that was not admitted waits for a message."""

_log = get_logger("catenary_services.grpc")


class CallServer(Protocol):
    """The part of a server that its calls use."""

    call_authorizer: CallAuthorizer
    budget: ReceivingBudget
    limits: ConnectionLimits
    longest_answer: int

    def call_admitted(self, source: str) -> None:
        """Counts an admitted call of a source.

        Raises:
            Overloaded: The source has too many.
        """
        ...


class CallOwner(CallerFacts, Protocol):
    """The connection of a call."""

    loop: asyncio.AbstractEventLoop
    unheard: dict[Call, None]

    @property
    def server(self) -> CallServer: ...

    @property
    def http2(self) -> ServerConnection[RequestHead]: ...

    @property
    def address(self) -> str: ...

    def left(self, call: Call) -> None:
        """Forgets a call that is over and no longer worked on."""
        ...


class Call:
    """One call of one method.

    Attributes:
        connection: Its connection.
        head: What its headers say.
        method: What is called.
        answer: What is sent.
        task: What works on it; None before that.
        since_s: When it began.
        source: Who is charged for it: a key or an address; "" until it is admitted.
        is_over: Whether its status is sent, or it has no caller any more.
        is_cancelled: Whether the caller went before the end.
        at_end: Called when the call is over.
    """

    __slots__ = (
        "_deadline_s",
        "_has_begun",
        "_incoming",
        "_refusal",
        "_stream",
        "_timer",
        "_variables",
        "_wake",
        "answer",
        "at_end",
        "connection",
        "head",
        "is_cancelled",
        "is_over",
        "method",
        "since_s",
        "source",
        "task",
    )

    def __init__(
        self,
        connection: CallOwner,
        stream: ServerStream,
        head: RequestHead,
        method: ServedMethod,
    ) -> None:
        """Creates a call that is not admitted yet."""
        sending = connection.http2.sending
        self.connection = connection
        self.head = head
        self.method = method
        self.answer = AnswerWriter(sending, stream)
        self.task: asyncio.Task[None] | None = None
        self.since_s = sending.now_s
        self.is_over = False
        self.is_cancelled = False
        self.at_end: list[Callable[[], None]] = []
        self._stream = stream
        self._variables = contextvars.copy_context()
        self._incoming: IncomingMessages | None = None
        self._refusal: CatenaryError | None = None
        """The answer to a stream that was not admitted, until its first message begins."""
        self.source = ""
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.Future[None] | None = None
        self._has_begun = False

    # ---- what happens to the stream ----

    def start(self, is_whole: bool) -> None:
        """Admits the call, and begins to serve it or to read its message."""
        method, connection = self.method, self.connection
        if self.head.timeout_s is not None:
            self._deadline_s = connection.loop.time() + self.head.timeout_s
            self._timer = connection.loop.call_at(self._deadline_s, self._on_deadline)
        try:
            enter = connection.server.call_authorizer.enter
            source = self._variables.run(enter, method.path, CallContext(self), connection.peer)
            source = source or connection.address
            connection.server.call_admitted(source)
            self.source = source
        except CatenaryError as error:
            if method.takes_stream and not is_whole:
                self._fail_soon(error)
            else:
                self._fail(error)
            return
        except Exception as error:
            self._failed(error)
            return
        if method.takes_stream:
            self._serve_soon(self._messages())
        elif method.empty is not None:
            self._serve_soon(method.empty())  # a message without fields needs no reading
        elif is_whole:
            self._refuse(InvalidInput("request", "the call has no message"))
        else:
            connection.unheard[self] = None

    def on_data(self, data: bytes, begin: int, end: int, is_last: bool) -> None:
        """Takes data of the stream."""
        method, size = self.method, end - begin - PREFIX_BYTES
        if self.is_over or (self.task is not None and not method.takes_stream):
            return
        try:
            if (
                self._incoming is None
                and 0 <= size <= method.longest_bytes
                and not method.takes_stream
                and size == int.from_bytes(data[begin : begin + PREFIX_BYTES], "big")
            ):
                # A whole message that is not compressed, as nearly all are.
                self._serve_message(data[begin + PREFIX_BYTES : end])
                return
            if self._refusal is not None:
                self._fail(self._refusal)
                return
            incoming = self._incoming or self._begin_to_read()
            incoming.feed(data, begin, end)
            if method.takes_stream:
                if is_last and incoming.is_within:
                    raise InvalidInput("request", "ends within a message")
                self._wake_up()
            elif incoming.complete:
                self._serve_message(incoming.take())
            elif is_last:
                raise InvalidInput("request", "the call has no message")
        except CatenaryError as error:
            self.give_up(error)

    def on_reset(self) -> None:
        """Ends the call for a caller that is no longer there."""
        self.is_cancelled = not self.is_over
        self._close()
        self._stop_task()

    def on_drained(self) -> None:
        """Wakes a handler that waits to write."""
        if self._wake is not None and self._stream.waiting_bytes <= _WRITE_AHEAD_BYTES:
            self._wake_up()

    def on_room(self) -> None:
        """Lets the caller send the rest of a message."""
        if self._incoming is not None:
            self._incoming.on_room()

    # ---- the end ----

    def give_up(self, error: CatenaryError) -> None:
        """Ends an admitted call whose message cannot be taken."""
        self._refuse(error)
        self._stop_task()

    def stop(self) -> None:
        """Ends the call because the server stops."""
        self.end(grpc.StatusCode.UNAVAILABLE, "the server stops")
        self._stop_task()

    def end(self, code: grpc.StatusCode, details: str, metadata: Sequence[Pair] = ()) -> None:
        """Ends the call with a status."""
        if not self.is_over:
            self.answer.code, self.answer.details = code, details
            self.answer.status(metadata)
            self._close()

    def _fail(self, error: CatenaryError) -> None:
        errors.forget_frames(error)
        self.end(grpc_code(error), public_message(error), trailing_metadata(error))

    def _fail_soon(self, error: CatenaryError) -> None:
        """Ends a stream once its first message begins, or soon.

        Clients of gRPC for Python that find their stream ended when they write to it take that for
        the error, and do not look at the status.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._refusal = error
        self._timer = self.connection.loop.call_later(_REFUSED_S, self._fail, error)

    def _refuse(self, error: CatenaryError) -> None:
        if not self.is_over:
            refused = self.connection.server.call_authorizer.refused
            self._variables.run(refused, self.method.path, CallContext(self), error)
            self._fail(error)

    def _close(self) -> None:
        """Forgets what the call waited for; nothing is sent from now on."""
        if self.is_over:
            return
        self.is_over = True
        self._refusal = None
        if self._timer is not None:
            self._timer.cancel()
        # Calls shall not need the collector of garbage.
        self._stream.receiver = None
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.leave()
        if self.task is None:
            self.connection.left(self)
        self._wake_up()
        for callback in self.at_end:
            callback()

    def _stop_task(self) -> None:
        if self.task is not None:
            self.task.cancel()
            if not self._has_begun:  # then it never will
                self.connection.left(self)

    def _on_deadline(self) -> None:
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        self._stop_task()

    # ---- the handler ----

    def _begin_to_read(self) -> IncomingMessages:
        connection = self.connection
        connection.unheard.pop(self, None)
        self._incoming = IncomingMessages(
            self,
            self.source,
            connection.http2,
            self._stream,
            connection.server.budget,
            longest=self.method.longest_bytes,
            first_window=connection.server.limits.first_window,
            encoding=self.head.encoding,
        )
        return self._incoming

    def _serve_message(self, raw: bytes | bytearray) -> None:
        self.connection.unheard.pop(self, None)
        self._serve_soon(self.method.request_in(raw))

    def _serve_soon(self, request: Any) -> None:
        loop = self.connection.loop
        self.task = loop.create_task(self._serve(request), context=self._variables)

    async def _serve(self, request: Any) -> None:
        self._has_begun = True
        method = self.method
        try:
            answer = method.behaviour(request, CallContext(self))
            if not method.answers_stream:
                self._finish(await answer if inspect.isawaitable(answer) else answer)
                return
            if inspect.isawaitable(answer):  # it writes to its context
                await answer
            else:
                async with aclosing(answer):
                    async for response in answer:
                        await self.write(response)
            self.end(self.answer.code, self.answer.details)
        except grpc.aio.AbortError:
            return
        except CatenaryError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:
            self._failed(error)
        finally:
            self.connection.left(self)

    def _failed(self, error: Exception) -> None:
        """Ends a call of which something failed here; only the log says what."""
        if self.answer.code is grpc.StatusCode.OK:
            _log.error("grpc_call_failed", method=self.method.path, exc_info=error)
            self.end(grpc.StatusCode.UNKNOWN, "the server failed to answer this call")
        else:  # the handler said itself what to answer
            self.end(self.answer.code, self.answer.details)

    def _finish(self, response: Any) -> None:
        """Ends a call with its only message."""
        if self.is_over:
            return
        answer, longest = self.answer, self.connection.server.longest_answer
        raw = None
        if answer.code is grpc.StatusCode.OK:
            raw = answer.serialized(self.method.serialize, response, longest)
        if raw is None:
            answer.status()
        else:
            answer.only_message(raw)
        self._close()

    # ---- streams ----

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def read(self) -> Any:
        """Returns the next message of the caller, or `grpc.aio.EOF`."""
        while True:
            incoming = self._incoming
            if incoming is not None and incoming.complete:
                return self.method.request_in(incoming.take())
            if self._stream.has_peer_ended or self.is_over:
                return grpc.aio.EOF
            await self._woken()

    async def write(self, message: Any) -> None:
        """Sends one message, as soon as the caller takes it.

        Raises:
            AbortError: The message is too long.
        """
        longest = self.connection.server.longest_answer
        raw = self.answer.serialized(self.method.serialize, message, longest)
        if raw is None:
            self.end(self.answer.code, self.answer.details)
            raise grpc.aio.AbortError("the message is too long")
        if not self.is_over:
            self.answer.message(raw)
        await asyncio.sleep(0)  # others have their turn however fast answers come
        while self._stream.waiting_bytes > _WRITE_AHEAD_BYTES and not self.is_over:
            await self._woken()

    def seconds_left(self) -> float | None:
        """Returns the seconds until the caller gives up; None if it does not."""
        if self.head.timeout_s is None:
            return None
        return max(0.0, self._deadline_s - self.connection.loop.time())

    async def _woken(self) -> None:
        """Waits until something happens to the stream."""
        if self._wake is None:
            self._wake = self.connection.loop.create_future()
        await asyncio.shield(self._wake)

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)
