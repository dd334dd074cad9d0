"""The demands of a server on calls: who may make them, and how long their messages may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio

from catenary_services.errors import CatenaryError
from catenary_services.grpc.server.methods import CONTROL_BYTES, BufferParser
from catenary_services.grpc.server.receiving_budget import MAX_RECEIVING_BYTES, MOST_OF_ONE_SOURCE

Context = grpc.aio.ServicerContext[Any, Any]


class CallAuthorizer(Protocol):
    """Decides which calls are admitted."""

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns who calls, for limits per caller; "" stands for the address of the connection.

        Raises:
            CatenaryError: The caller may not make this call.
        """
        ...

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Notes an admitted call whose message could not be taken."""
        ...


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """Limits on what a server accepts from its callers."""

    call_authorizer: CallAuthorizer | None = None
    """Decides who may call what; None for the roles of the authorizer, or for everybody without
    one."""
    most_bytes: Mapping[str, int] = field(default_factory=dict)
    """The longest message in bytes of each method that is named."""
    usual_bytes: int = CONTROL_BYTES
    """The longest message in bytes of every other method."""
    buffer_parsers: Mapping[str, BufferParser] = field(default_factory=dict)
    """Parsers of some methods, in place of those of their handlers."""
    receiving_bytes: int = MAX_RECEIVING_BYTES
    """Bytes of all messages that are arriving."""
    receiving_bytes_of_one: int = MOST_OF_ONE_SOURCE
    """Bytes of the messages that are arriving from one source."""


def address_of(peer: str) -> str:
    """Returns the address in gRPC's name of a connection, "ipv4:10.0.0.7:51234"."""
    return peer.rpartition(":")[0]
