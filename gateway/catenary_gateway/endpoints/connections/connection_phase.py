"""The phases of an HTTP connection."""

from __future__ import annotations

from enum import Enum, auto


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
