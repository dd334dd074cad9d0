"""One call: its context, as handlers know it from gRPC, and its course from headers to trailers."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from catenary_services import errors
from catenary_services.errors import CatenaryError, InvalidInput, InvalidMessage
from catenary_services.grpc.error_details import public_message
from catenary_services.grpc.error_tables import grpc_code, trailing_metadata
from catenary_services.grpc.server.compression import ENCODINGS
from catenary_services.grpc.server.incoming import PREFIX_BYTES, IncomingMessages
from catenary_services.grpc.server.methods import ServedMethod
from catenary_services.grpc.server.request_head import RequestHead
from catenary_services.grpc.server.response_blocks import (
    HEAD_BLOCK,
    OK_TRAILERS,
    Pair,
    head_block,
    trailers_block,
)
from catenary_services.http2.stream import Http2Stream
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_services.grpc.server.connection import CallConnection

_WRITE_AHEAD_BYTES = 64 * 1024
"""Bytes that may wait for the caller before a handler that writes more has to wait."""
_JOINED_BYTES = 16 * 1024

_log = get_logger("catenary_services.grpc")


class Call(grpc.aio.ServicerContext[Any, Any]):
    """One call of one method.

    Attributes:
        task: What works on it; None before that.
        since_s: When it began.
    """

    def __init__(
        self,
        connection: CallConnection,
        stream: Http2Stream,
        head: RequestHead,
        method: ServedMethod,
    ) -> None:
        """Creates a call that is not admitted yet."""
        self._connection = connection
        self._sending = connection.http2.sending
        self._stream = stream
        self._head = head
        self._method = method
        self._context = contextvars.copy_context()
        self._incoming: IncomingMessages | None = None
        self._source = ""
        self._deadline_s = 0.0
        self.since_s = self._sending.now_s
        self.task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.Future[None] | None = None
        self._has_begun = False
        self._has_headers = False
        self._is_over = False
        self._is_cancelled = False
        self._initial: tuple[Pair, ...] = ()
        self._trailing: tuple[Pair, ...] = ()
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._callbacks: list[Callable[[Any], None]] = []

    # ---- the course of a call ----

    def start(self, is_whole: bool) -> None:
        """Admits the call, and begins to serve it or to read its message."""
        head, method, server = self._head, self._method, self._connection.server
        if head.timeout_s is not None:
            loop = self._connection.loop
            self._deadline_s = loop.time() + head.timeout_s
            self._timer = loop.call_at(self._deadline_s, self._on_deadline)
        try:
            source = self._context.run(
                server.call_authorizer.enter, method.path, self, self._connection.peer
            )
        except CatenaryError as error:
            self.fail(error)
            return
        if head.encoding not in ENCODINGS:
            why = f"messages cannot be compressed by {head.encoding[:32]!r}"
            self._end(grpc.StatusCode.UNIMPLEMENTED, why)
            return
        self._source = source or self._connection.address
        if method.takes_stream:
            self._serve_soon(self._messages())
        elif method.empty is not None:
            self._serve_soon(method.empty())
        elif is_whole:
            self._refuse(InvalidInput("request", "the call has no message"))
        else:
            self._connection.unheard[self] = None

    def on_data(self, data: bytes, begin: int, end: int, is_last: bool) -> None:
        """Takes data of the stream."""
        method = self._method
        if self._is_over or (self.task is not None and not method.takes_stream):
            return
        size = end - begin - PREFIX_BYTES
        try:
            if (
                self._incoming is None
                and size >= 0
                and not method.takes_stream
                and size == int.from_bytes(data[begin : begin + PREFIX_BYTES], "big")
                and size <= method.longest_bytes
            ):
                # A whole message that is not compressed, as nearly all are.
                self._serve_message(data[begin + PREFIX_BYTES : end])
                return
            if self._incoming is None:
                self._incoming = self._make_incoming()
            incoming = self._incoming
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
            self._refuse(error)

    def on_reset(self) -> None:
        """Ends the call for a caller that is no longer there."""
        self._is_cancelled = True
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

    def give_up(self, error: CatenaryError) -> None:
        """Ends a call whose message does not arrive as it should."""
        self._refuse(error)
        self._stop_task()

    def stop(self) -> None:
        """Ends the call because the server stops."""
        self._end(grpc.StatusCode.UNAVAILABLE, "the server stops")
        self._stop_task()

    def fail(self, error: CatenaryError) -> None:
        """Ends the call with an error."""
        errors.forget_frames(error)
        self._end(grpc_code(error), public_message(error), trailing_metadata(error))

    def _refuse(self, error: CatenaryError) -> None:
        """Ends an admitted call whose message cannot be taken."""
        if not self._is_over:
            refused = self._connection.server.call_authorizer.refused
            self._context.run(refused, self._method.path, self, error)
            self.fail(error)

    def _make_incoming(self) -> IncomingMessages:
        connection = self._connection
        self._connection.unheard.pop(self, None)
        return IncomingMessages(
            self,
            self._source,
            connection.http2,
            self._stream,
            connection.server.budget,
            longest=self._method.longest_bytes,
            first_window=connection.server.limits.first_window,
            encoding=self._head.encoding,
        )

    def _serve_message(self, raw: bytes) -> None:
        self._connection.unheard.pop(self, None)
        self._serve_soon(self._parsed(raw))

    def _parsed(self, raw: bytes) -> Any:
        """Returns the message in some bytes.

        Raises:
            InvalidInput: There is none in them, or none that keeps its rules.
        """
        if self._method.parse is None:
            return raw
        try:
            message = self._method.parse(raw)
        except Exception as error:  # kinds of exceptions differ between implementations of protobuf
            raise InvalidInput("request", "is not a message of this method") from error
        if isinstance(message, InvalidMessage):
            if self._method.takes_stream:
                raise message
            # The caller may be a person, who is told as for any other wrong input.
            raise InvalidInput(message.field, message.message.partition(": ")[2])
        return message

    def _serve_soon(self, request: Any) -> None:
        loop = self._connection.loop
        self.task = loop.create_task(self._serve(request), context=self._context)

    async def _serve(self, request: Any) -> None:
        self._has_begun = True
        method = self._method
        try:
            answer = method.behaviour(request, self)
            if not method.answers_stream:
                response = await answer if inspect.isawaitable(answer) else answer
                self._answer(response)
                return
            if inspect.isawaitable(answer):  # it writes to its context
                await answer
            else:
                async with aclosing(answer):
                    async for response in answer:
                        await self.write(response)
            self._end(self._code, self._details, self._trailing)
        except grpc.aio.AbortError:
            return
        except CatenaryError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:
            self._failed(error)
        finally:
            self._connection.left(self)

    def _failed(self, error: Exception) -> None:
        """Ends a call whose handler failed; only the log says how."""
        if self._code is grpc.StatusCode.OK:
            _log.error("grpc_handler_failed", method=self._method.path, exc_info=error)
            self._end(grpc.StatusCode.UNKNOWN, "the handler of this method failed")
        else:
            self._end(self._code, self._details, self._trailing)

    def _answer(self, response: Any) -> None:
        """Ends a call with its only message."""
        if self._is_over:
            return
        if self._code is not grpc.StatusCode.OK:
            self._end(self._code, self._details, self._trailing)
            return
        serialize = self._method.serialize
        raw = serialize(response) if serialize is not None else response
        size = len(raw)
        if size > self._connection.server.longest_answer:
            why = f"the answer has {size} bytes, more than may be sent"
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            return
        trailers = OK_TRAILERS
        if self._trailing or self._details:
            trailers = trailers_block(self._code, self._details, self._trailing)
        prefix = size.to_bytes(PREFIX_BYTES, "big")
        if not self._has_headers and size <= _JOINED_BYTES:
            block = head_block(self._initial) if self._initial else HEAD_BLOCK
            self._has_headers = True
            self._sending.answer(self._stream, block, prefix + raw, trailers)
        else:
            self._send_headers()
            self._send_message(prefix, raw)
            self._sending.trailers(self._stream, trailers)
        self._close()

    def _end(self, code: grpc.StatusCode, message: str, metadata: Sequence[Pair] = ()) -> None:
        """Ends the call with a status."""
        if self._is_over:
            return
        self._code, self._details = code, message
        trailers = trailers_block(code, message, (*self._trailing, *metadata))
        if not self._has_headers:
            trailers = HEAD_BLOCK + trailers
        self._sending.trailers(self._stream, trailers)
        self._close()

    def _close(self) -> None:
        """Forgets what the call waited for; nothing is sent from now on."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        # Calls shall not need the collector of garbage.
        self._stream.receiver = None
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.leave()
        if self.task is None:
            self._connection.left(self)
        self._wake_up()
        for callback in self._callbacks:
            callback(self)

    def _stop_task(self) -> None:
        if self.task is not None:
            self.task.cancel()
            if not self._has_begun:  # then it never will
                self._connection.left(self)

    def _on_deadline(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        self._stop_task()

    # ---- reading and writing ----

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def read(self) -> Any:
        """Returns the next message of the caller, or `grpc.aio.EOF`."""
        while True:
            incoming = self._incoming
            if incoming is not None and incoming.complete:
                return self._parsed(incoming.take())
            if self._stream.has_peer_ended or self._is_over:
                return grpc.aio.EOF
            await self._woken()

    async def write(self, message: Any) -> None:
        """Sends one message, as soon as the caller takes it."""
        serialize = self._method.serialize
        raw = serialize(message) if serialize is not None else message
        if len(raw) > self._connection.server.longest_answer:
            why = f"an answer has {len(raw)} bytes, more than may be sent"
            await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._send_headers()
        self._send_message(len(raw).to_bytes(PREFIX_BYTES, "big"), raw)
        await asyncio.sleep(0)  # others have their turn however fast answers come
        while self._stream.waiting_bytes > _WRITE_AHEAD_BYTES and not self._is_over:
            await self._woken()

    def _send_headers(self) -> None:
        if not self._has_headers:
            self._has_headers = True
            self._sending.headers(self._stream, head_block(self._initial))

    def _send_message(self, prefix: bytes, raw: bytes) -> None:
        if len(raw) <= _JOINED_BYTES:
            self._sending.data(self._stream, prefix + raw)
        else:
            self._sending.data(self._stream, prefix)
            self._sending.data(self._stream, raw)

    async def _woken(self) -> None:
        """Waits until something happens to the stream."""
        if self._wake is None:
            self._wake = self._connection.loop.create_future()
        await asyncio.shield(self._wake)

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    # ---- what handlers may ask and say ----

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Sends the headers of the answer."""
        self._initial = tuple(initial_metadata)
        self._send_headers()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Any = (),
    ) -> NoReturn:
        """Ends the call with a status.

        Raises:
            AbortError: Always.
        """
        if code is grpc.StatusCode.OK:
            _log.error("grpc_aborted_with_ok", method=self._method.path)
            code = grpc.StatusCode.UNKNOWN
        self._end(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("the call was aborted")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with a status that has everything in it."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets what is sent with the status."""
        self._trailing = tuple(trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status of the end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Sets the message of the status."""
        self._details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Does nothing, as answers are sent as they are."""

    def disable_next_message_compression(self) -> None:
        """Does nothing, as answers are sent as they are."""

    def invocation_metadata(self) -> Any:
        """Returns the metadata of the caller."""
        return self._head.metadata

    def trailing_metadata(self) -> Any:
        """Returns what is sent with the status."""
        return self._trailing

    def code(self) -> Any:
        """Returns the status."""
        return self._code

    def details(self) -> str:
        """Returns the message of the status."""
        return self._details

    def peer(self) -> str:
        """Returns the address and port of the caller, as gRPC writes them."""
        return self._connection.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """Returns the names in the caller's certificate."""
        return self.auth_context().get("x509_subject_alternative_name")

    def peer_identity_key(self) -> str | None:
        """Returns what kind of names `peer_identities` are."""
        return "x509_subject_alternative_name" if self.peer_identities() else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns what the handshake told of the caller."""
        return self._connection.auth_context

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """Returns the seconds until the caller gives up; None if it does not."""
        if self._head.timeout_s is None:
            return None
        return max(0.0, self._deadline_s - self._connection.loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Has a function called at the end of the call."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Returns True if the caller has gone before the end."""
        return self._is_cancelled

    def done(self) -> bool:
        """Returns True if the call is over."""
        return self._is_over
