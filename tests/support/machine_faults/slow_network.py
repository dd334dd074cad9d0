"""A TCP proxy that carries so many bytes a second, or none: a slow link between two endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
"""Of the kernel: more would hide how slow the link is."""
_LATE_S = 0.25
"""A busy machine wakes the proxy late: it makes up for as much, so that its rate is kept."""


class SlowNetwork:
    """Carries what clients send to one server at a rate; what comes back, at once."""

    def __init__(self, target: str, bytes_per_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.bytes_per_s = bytes_per_s
        self.address = ""

    def stall(self) -> None:
        """Carries nothing to the server from now on."""
        self._flows.clear()

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listening)
            client.setblocking(False)
            self._tasks.add(asyncio.create_task(self._carry(client)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client, socket.socket() as server:
            server.setblocking(False)
            await loop.sock_connect(server, self._target)
            with contextlib.suppress(OSError):
                back = asyncio.create_task(self._pipe(server, client, slow=False))
                try:
                    await self._pipe(client, server, slow=True)
                finally:
                    back.cancel()
                    await asyncio.gather(back, return_exceptions=True)

    async def _pipe(self, source: socket.socket, sink: socket.socket, *, slow: bool) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while piece := await loop.sock_recv(source, _PIECE_BYTES):
            if slow:
                await self._flows.wait()
                due_s = max(due_s, loop.time() - _LATE_S) + len(piece) / self.bytes_per_s
                await asyncio.sleep(due_s - loop.time())
            await loop.sock_sendall(sink, piece)


@asynccontextmanager
async def slow_network(target: str, bytes_per_s: float) -> AsyncIterator[SlowNetwork]:
    """A proxy before "host:port"; `address` is its own."""
    network = SlowNetwork(target, bytes_per_s)
    with socket.socket() as listening:
        # Inherited by what is accepted; set before it listens, it bounds the window, too.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        network.address = f"127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(network.serve(listening))
        try:
            yield network
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await network.close()
