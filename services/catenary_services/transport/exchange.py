"""Parts that the transports share: received frames, handshakes, calls of the handler."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InvalidInput,
    PartitionLost,
)
from catenary_services.log import get_logger
from catenary_services.security.identity import (
    PEER_ROLES,
    Identity,
    identity_of_socket,
    require_name,
    require_role,
)
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.transport.frames import (
    ALIGNMENT,
    MessageKind,
    MessagePrefix,
    encode_prefix,
)
from catenary_services.transport.interface import (
    NOBODY,
    Capabilities,
    FrameHandler,
    FrameSender,
    ReceivedFrame,
)

T = TypeVar("T")
EMPTY = memoryview(b"")
HANDSHAKE_S = 5.0
"""Seconds that a new connection has to send the id of its peer."""
MEMORY_WAIT_S = 60.0
"""Seconds that a connection waits for receive memory before it is given up."""

_LONGEST_ID = 128
"""The most bytes of a peer's id."""
_CLEARED_BYTES = 16 << 10
"""Up to this size, cleared memory is obtained faster than uncleared memory."""
_log = get_logger("catenary_services.transport")


def aligned(nbytes: int) -> memoryview:
    """Returns fresh writable memory whose address is a multiple of 64."""
    if nbytes == 0:
        return memoryview(bytearray())
    if nbytes <= _CLEARED_BYTES:
        # With clearing, this takes a third of the time of asking an array for its address.
        small = bytearray(nbytes + ALIGNMENT)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(small)) % ALIGNMENT
        return memoryview(small)[start : start + nbytes]
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.__array_interface__["data"][0] % ALIGNMENT
    return buffer.data[start : start + nbytes]


class MemoryFrame:
    """A frame that arrived, with the function that frees its memory."""

    __slots__ = ("_on_release", "capabilities", "header", "payload", "sender")

    def __init__(
        self,
        header: bytes,
        payload: memoryview,
        capabilities: Capabilities,
        on_release: Callable[[], None] | None,
        sender: FrameSender = NOBODY,
    ) -> None:
        self.header = header
        self.payload = payload
        self.capabilities = capabilities
        self._on_release = on_release
        self.sender = sender

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        self.payload = EMPTY
        if on_release is not None:
            on_release()


def deliver(handler: FrameHandler, frame: ReceivedFrame) -> None:
    """Hands a frame to the handler.

    If the handler fails, the frame is lost but not the connection.
    """
    try:
        handler(frame)
    except Exception:
        _log.exception("frame_handler_failed")
        frame.release()


def introduction(kind: MessageKind, peer_id: str) -> bytes:
    """Returns a HELLO or WELCOME, with which a process says who it is."""
    name = peer_id.encode()
    return encode_prefix(MessagePrefix(kind, len(name))) + name


def peer_id_of(header: bytes | memoryview) -> str:
    """Returns the peer id in the header of a HELLO.

    Raises:
        InvalidInput: The header holds no peer id.
    """
    name = str(header[: 2 * _LONGEST_ID], "utf-8", "replace")
    if not name:
        raise InvalidInput("peer_id", "must not be empty")
    if len(header) > _LONGEST_ID or not name.isprintable():
        raise InvalidInput("peer_id", f"{name[:_LONGEST_ID]!r} is none")
    return name


def sender_of(
    header: bytes | memoryview, security: ServerSecurity, identity: Callable[[], Identity]
) -> FrameSender:
    """Returns the sender that a HELLO names, after checking its certificate.

    Args:
        header: Header of the HELLO: the peer id.
        security: Security settings of this process.
        identity: Reads the identity in the certificate; called only where there must be one.

    Raises:
        InvalidInput: The header holds no valid peer id.
        Unauthenticated: The peer has no certificate of this system.
        PermissionDenied: The certificate is for another cluster, role or peer.
    """
    name = peer_id_of(header)
    if security.insecure:
        return FrameSender(name)
    return FrameSender(name, _checked(identity(), security.cluster, name).role)


def check_receiver(security: ClientSecurity, connection: object, name: str) -> None:
    """Checks that a TLS connection was answered by the gateway or agent called `name`.

    Raises:
        Unauthenticated: The peer has no certificate of this system.
        PermissionDenied: The certificate is for another cluster, role or peer.
    """
    if not security.insecure:
        _checked(identity_of_socket(connection), security.cluster, name)


def _checked(identity: Identity, cluster: str, name: str) -> Identity:
    require_role(identity, cluster, PEER_ROLES, "exchange frames")
    require_name(identity, name)
    return identity


def refused(transport: str, error: CatenaryError) -> None:
    """Logs that a peer sent a malformed frame."""
    _log.warning("malformed_frame", transport=transport, error=error.message)


def lost(transport: str, why: str) -> PartitionLost:
    """Returns the error of a link whose peer is gone."""
    return PartitionLost(f"{transport} link lost: {why}")


async def unless_stalled(
    done: asyncio.Future[T], timeout_s: float, progress: Callable[[], int]
) -> T:
    """Returns the result of `done`, for which it waits while `progress` keeps changing.

    Raises:
        TimeoutError: `progress` did not change for `timeout_s`; `done` goes on.
    """
    while True:
        before = progress()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(done)
        except TimeoutError:
            if progress() == before:
                raise


def push_timed_out(transport: str, timeout_s: float) -> DeadlineExceeded:
    """Returns the error of a push that the peer did not accept in time."""
    return DeadlineExceeded(
        f"the peer took no byte over {transport} for {timeout_s:g} s",
        details={"stage": "transfer"},
    )
