"""The gRPC half of the asyncio client; `catenary.channels` has the same names for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any, TypeVar

import grpc

from catenary.errors import UnavailableError
from catenary.rpc.attempts import RetryAttempts
from catenary.rpc.calls import RpcCall, Service
from catenary.rpc.connection import Connection, stub_class
from catenary.rpc.failures import error_of_call

T = TypeVar("T")

# grpc.aio puts this in place of the server's status when a write is under way as the server ends
# the stream (about one time in six with messages of 2 MB); the status cannot be had any more.
_WRITE_FAILED = "Internal error from Core"


class AsyncChannels:
    """The channels of one client, opened in the loop that uses them, not where it was made."""

    def __init__(self, _first: Connection) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, Service], Any] = {}
        self._closed = False

    def stub(self, service: Service, connection: Connection) -> Any:
        """Returns the generated stub of a service."""
        if self._closed:
            raise RuntimeError("this client is closed")
        address = connection.address(admin=service == "admin")
        if address not in self._channels:
            self._channels[address] = _open(connection, address)
        if (address, service) not in self._stubs:
            self._stubs[address, service] = stub_class(service)(self._channels[address])
        return self._stubs[address, service]

    async def call(self, call: RpcCall[T], attempts: RetryAttempts) -> T:
        """Returns the answer to one attempt at a call."""
        connection = attempts.connection
        method = getattr(self.stub(call.service, connection), call.method)
        metadata = connection.metadata
        try:
            if call.tells_deadline:
                return call.read(
                    await method(call.request, timeout=attempts.remaining_s, metadata=metadata)
                )
            async with asyncio.timeout(attempts.remaining_s):
                reply = await method(call.request, metadata=metadata)
            return call.read(reply)
        except TimeoutError:
            raise attempts.timeout_error() from None
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error

    async def stream(
        self, method: Any, request: Any, timeout_s: float | None, connection: Connection
    ) -> AsyncGenerator[Any, None]:
        """Yields the answers to a streaming call, which ends when this is closed."""
        stream = method(request, timeout=timeout_s, metadata=connection.metadata)
        try:
            async for reply in stream:
                yield reply
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_FAILED:
                raise UnavailableError(
                    "the server ended the stream while requests were being sent", code="INTERNAL"
                ) from error
            raise error_of_call(error) from error
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Closes them; calls in flight are cancelled."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close()


async def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Yields the items of either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _open(connection: Connection, target: str) -> grpc.aio.Channel:
    credentials = connection.credentials()
    options = connection.options(target)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)
