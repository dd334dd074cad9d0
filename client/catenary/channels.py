"""The gRPC half of the blocking client; `catenary.async_channels` has the same names."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

import grpc

from catenary.rpc.attempts import RetryAttempts
from catenary.rpc.calls import RpcCall, Service
from catenary.rpc.connection import Connection, stub_class
from catenary.rpc.failures import error_of_call

T = TypeVar("T")


class Channels:
    """The channels of one client, the first of them opened at once; for several threads."""

    def __init__(self, first: Connection) -> None:
        self._lock = threading.Lock()
        self._channels = {first.target: _open(first, first.target)}
        self._stubs: dict[tuple[str, Service], Any] = {}
        self._closed = False

    def stub(self, service: Service, connection: Connection) -> Any:
        """Returns the generated stub of a service."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            address = connection.address(admin=service == "admin")
            if address not in self._channels:
                self._channels[address] = _open(connection, address)
            if (address, service) not in self._stubs:
                self._stubs[address, service] = stub_class(service)(self._channels[address])
            return self._stubs[address, service]

    def call(self, call: RpcCall[T], attempts: RetryAttempts) -> T:
        """Returns the answer to one attempt at a call."""
        connection = attempts.connection
        method = getattr(self.stub(call.service, connection), call.method)
        metadata = connection.metadata
        future: Any = None
        try:
            if call.tells_deadline:
                reply = method(call.request, timeout=attempts.remaining_s, metadata=metadata)
                return call.read(reply)
            future = method.future(call.request, metadata=metadata)
            return call.read(future.result(timeout=attempts.remaining_s))
        except grpc.FutureTimeoutError:
            raise attempts.timeout_error() from None
        except grpc.RpcError as error:
            raise error_of_call(error) from error
        finally:
            # Also when interrupted: nobody waits for the answer any more.
            if future is not None and not future.done():
                future.cancel()

    def stream(
        self, method: Any, request: Any, timeout_s: float | None, connection: Connection
    ) -> Generator[Any, None, None]:
        """Yields the answers to a streaming call, which ends when this is closed."""
        stream = method(request, timeout=timeout_s, metadata=connection.metadata)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise error_of_call(error) from error
        finally:
            stream.cancel()

    def close(self) -> None:
        """Closes them; calls in flight are cancelled."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()


def each(items: Iterable[T]) -> Iterable[T]:
    """Returns the items: there is one kind of iterable here."""
    return items


def _open(connection: Connection, target: str) -> grpc.Channel:
    credentials = connection.credentials()
    options = connection.options(target)
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)
