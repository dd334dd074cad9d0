"""The phases of a connection, and the part of its owner that it uses."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from catenary_gateway.endpoints.connections.http_call import Body, HttpCall
from catenary_gateway.endpoints.connections.library_handler import LibraryHandler
from catenary_gateway.endpoints.connections.request_headers import InferenceTarget

if TYPE_CHECKING:
    from catenary_gateway.endpoints.connections.http_connection import HttpConnection


class ConnectionPhase(Enum):
    """The meaning of the next bytes of a connection, which says who gets them."""

    HEADERS = auto()
    """The headers of a request."""
    ADMITTING = auto()
    """The body of a request that may still be refused: they wait."""
    BODY = auto()
    """The body of a request, for its buffer."""
    ANSWERING = auto()
    """The next requests, which wait until the present one is answered."""
    SKIPPING = auto()
    """The rest of a body whose request is answered: they are thrown away."""
    LENT = auto()
    """The body of a request that aiohttp answers; what is behind it waits."""
    GIVEN = auto()
    """All that comes: aiohttp has the connection for good."""


class ConnectionOwner(Protocol):
    """The part of `HttpConnections` that a connection uses."""

    scratch: memoryview
    """The memory that connections read into while they know of none that is better."""

    def opened(self, connection: HttpConnection) -> None: ...

    def closed(self, connection: HttpConnection) -> None: ...

    def spoke(self, connection: HttpConnection) -> None:
        """Notes that a connection has sent the headers of a request."""
        ...

    def library_handler(self, connection: HttpConnection) -> LibraryHandler:
        """Returns a new handler of aiohttp's."""
        ...

    async def answer(self, call: HttpCall, target: InferenceTarget, address: str) -> list[Body]:
        """Returns the bytes of the answer to a request to infer, which may report an error."""
        ...
