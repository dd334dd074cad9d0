"""The context of a call as handlers know it from gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
import grpc.aio

from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_services.grpc.server.answer_writer import AnswerWriter
    from catenary_services.grpc.server.methods import ServedMethod
    from catenary_services.grpc.server.request_head import RequestHead
    from catenary_services.grpc.server.response_blocks import Pair

_NAMES = "x509_subject_alternative_name"

_log = get_logger("catenary_services.grpc")


class CallerFacts(Protocol):
    """The facts of the other side that a connection knows."""

    @property
    def peer(self) -> str: ...

    @property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class ServedCall(Protocol):
    """The part of a call that its handler sees."""

    head: RequestHead
    method: ServedMethod
    answer: AnswerWriter
    at_end: list[Callable[[], None]]
    is_over: bool
    is_cancelled: bool

    @property
    def connection(self) -> CallerFacts: ...

    def end(self, code: grpc.StatusCode, details: str, metadata: Sequence[Pair] = ()) -> None: ...

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...

    def seconds_left(self) -> float | None: ...


class CallContext(grpc.aio.ServicerContext[Any, Any]):
    """The context through which a handler asks and answers its caller."""

    def __init__(self, call: ServedCall) -> None:
        self._call = call

    async def read(self) -> Any:
        """Returns the next message of the caller, or `grpc.aio.EOF`."""
        return await self._call.read()

    async def write(self, message: Any) -> None:
        """Sends one message, as soon as the caller takes it."""
        await self._call.write(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Sends the headers of the answer."""
        if not self.done():
            self._call.answer.headers(initial_metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """Ends the call with a status.

        Raises:
            AbortError: Always.
        """
        if code is grpc.StatusCode.OK:
            _log.error("grpc_aborted_with_ok", method=self._call.method.path)
            code = grpc.StatusCode.UNKNOWN
        self._call.end(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("the call was aborted")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with a status that has everything in it."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets what is sent with the status."""
        self._call.answer.trailing = tuple(trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status of the end."""
        self._call.answer.code = code

    def set_details(self, details: str) -> None:
        """Sets the message of the status."""
        self._call.answer.details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Does nothing, as answers are sent as they are."""

    def disable_next_message_compression(self) -> None:
        """Does nothing, as answers are sent as they are."""

    def invocation_metadata(self) -> Any:
        """Returns the metadata of the caller."""
        return self._call.head.metadata

    def trailing_metadata(self) -> Any:
        """Returns what is sent with the status."""
        return self._call.answer.trailing

    def code(self) -> Any:
        """Returns the status."""
        return self._call.answer.code

    def details(self) -> str:
        """Returns the message of the status."""
        return self._call.answer.details

    def peer(self) -> str:
        """Returns the address and port of the caller, as gRPC writes them."""
        return self._call.connection.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """Returns the names in the caller's certificate."""
        return self.auth_context().get(_NAMES)

    def peer_identity_key(self) -> str | None:
        """Returns what kind of names `peer_identities` are."""
        return _NAMES if self.peer_identities() else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns what the handshake told of the caller."""
        return self._call.connection.auth_context

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """Returns the seconds until the caller gives up; None if it does not."""
        return self._call.seconds_left()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Has a function called at the end of the call."""
        self._call.at_end.append(lambda: callback(self))

    def cancelled(self) -> bool:
        """Returns True if the caller has gone before the end."""
        return self._call.is_cancelled

    def done(self) -> bool:
        """Returns True if the call is over."""
        return self._call.is_over
