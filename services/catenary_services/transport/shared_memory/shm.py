"""Frames through shared memory, for two processes on one machine.

The sender owns memory in sealed memfd segments and passes each segment's descriptor once over a
Unix socket; the receiver maps it for reading only. A push is then a message of some hundred bytes:
header and slot. The receiver reads the very memory the producer wrote and sends the slot back with
another message. Small payloads travel in the message. When a process dies, the kernel closes its
socket and the memory goes with its last mapping: nothing stays behind but the socket's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from catenary_services.errors import PartitionLost
from catenary_services.transport.exchange import HANDSHAKE_S, lost
from catenary_services.transport.interface import EndpointAddress, FrameHandler, Link
from catenary_services.transport.memory import MemoryPool, shared_segment
from catenary_services.transport.settings import TransportSettings, host_id, socket_path
from catenary_services.transport.shared_memory.shm_link import ShmLink, ShmReceiver

_BACKLOG = 128
_PEER_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer, as the kernel gives them."""
_MAX_CONNECTIONS = 1024
_MOST_UNKNOWN = 128
"""The most connections without a peer id; at one more, the oldest is closed."""


class ShmEndpoint:
    """One process's side of the shared-memory transport."""

    def __init__(self, peer_id: str, settings: TransportSettings) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._pool = MemoryPool(settings.shm_bytes, shared_segment)
        self._path = socket_path(settings.runtime_dir, peer_id)
        self._listener: socket.socket | None = None
        self._inode = 0
        self._links: set[ShmLink] = set()
        self._receivers: set[ShmReceiver] = set()
        self._handler: FrameHandler | None = None

    @property
    def address(self) -> EndpointAddress:
        """Address at which peers reach this endpoint."""
        return EndpointAddress("shm", str(self._path), host_id())

    async def start(self, handler: FrameHandler) -> None:
        """Starts to receive, replacing what a killed predecessor left at the socket's path."""
        self._handler = handler
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._inode = self._path.stat().st_ino
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        if self._listener is None or self._handler is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._receivers) >= _MAX_CONNECTIONS or not is_own_user(sock):
            sock.close()
            return
        sock.setblocking(False)
        unknown = [each for each in self._receivers if not each.is_known]
        if len(unknown) >= _MOST_UNKNOWN:
            min(unknown, key=lambda each: each.since_s).close(lost("shm", "too many are unknown"))
        receiver = ShmReceiver(
            sock, self._peer_id, self._settings, self._handler, self._receivers.discard
        )
        self._receivers.add(receiver)

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> Link:
        """Opens a link to the endpoint at `address`, which must belong to the same user.

        Raises:
            PartitionLost: Nobody answers within `timeout_s`, or a process of another user.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(min(timeout_s, HANDSHAKE_S)):
                await asyncio.get_running_loop().sock_connect(sock, address.address)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError | TimeoutError):
                raise lost("shm", f"{address.address}: {error}") from error
            raise
        if not is_own_user(sock):
            sock.close()
            raise lost("shm", f"{address.address} belongs to another user")
        link = ShmLink(sock, self._pool, self._settings, self._links.discard)
        self._links.add(link)
        try:
            await link.introduce(self._peer_id, timeout_s)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
            self._remove_path()
        for receiver in tuple(self._receivers):
            receiver.close(PartitionLost("this process is closing"))
        for link in tuple(self._links):
            await link.close()

    def _remove_path(self) -> None:
        # A successor may already listen at the same path; its socket is another inode.
        with contextlib.suppress(OSError):
            if os.stat(Path(self._path)).st_ino == self._inode:
                self._path.unlink()


def is_own_user(sock: socket.socket) -> bool:
    """Returns True if the process at the other end runs as the same user, or as root.

    Every process of this user could read this process's memory anyway. Nobody else may send or
    receive here, whatever the mode of the folder.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(raw)
    return user in (os.geteuid(), 0)
