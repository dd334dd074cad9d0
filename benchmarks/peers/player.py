"""Plays prebuilt requests where no generator in C is installed.

    python -m benchmarks.peers.player DOCUMENT BODY

DOCUMENT is JSON with port, path, headers and numbers, BODY a file. Every connection has one request
in flight. The last line that it prints is the outcome, as `load.of_lines` reads it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.player_http2 import GrpcConnection

_FIRST_ANSWER_S = 60.0


class Plays(Protocol):
    """A connection that sends the one request and waits for its answer."""

    async def play(self) -> int:
        """Returns the bytes of the answer's body, or -1 for a failure."""

    async def close(self) -> None: ...


class HttpConnection:
    """A connection of HTTP/1.1 that stays open."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._request = request

    @classmethod
    async def open(cls, document: dict[str, Any], body: bytes) -> HttpConnection:
        """Connects; `document` is that of the command line."""
        port = document["port"]
        headers = {"Host": f"127.0.0.1:{port}", "Content-Length": len(body)} | document["headers"]
        lines = [f"POST {document['path']} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        return cls(*await asyncio.open_connection("127.0.0.1", port), head + body)

    async def play(self) -> int:
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        size = await self._body(headers)
        return size if first.split()[1] == "200" else -1

    async def _body(self, headers: dict[str, str]) -> int:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            size = int(headers.get("content-length", "0"))
            await self._reader.readexactly(size)
            return size
        total = 0
        while size := int((await self._reader.readline()).split(b";")[0], 16):
            await self._reader.readexactly(size + 2)
            total += size
        await self._reader.readuntil(b"\r\n")
        return total

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def played(
    opened: Callable[[], Awaitable[Plays]], connections: int, count: int, least_bytes: int
) -> dict[str, float]:
    """Plays `count` requests over some connections, and returns the outcome.

    An answer that is shorter than `least_bytes` is a failure; a connection that breaks is one, and
    is replaced.
    """
    left = iter(range(count))
    spent_ns: list[int] = []
    failed = 0

    async def work() -> None:
        nonlocal failed
        connection = await opened()
        for _ in left:
            start = time.perf_counter_ns()
            try:
                size = await asyncio.wait_for(connection.play(), _FIRST_ANSWER_S)
            except (OSError, EOFError, ValueError, TimeoutError):
                size = -1
                await connection.close()
                connection = await opened()
            spent_ns.append(time.perf_counter_ns() - start)
            failed += size < least_bytes
        await connection.close()

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    seconds = time.perf_counter() - start
    spent_ns.sort()

    def percentile_ms(share: float) -> float:
        return spent_ns[min(len(spent_ns) - 1, int(share * len(spent_ns)))] / 1e6

    return {
        "answers": len(spent_ns),
        "failed": failed,
        "seconds": seconds,
        "p50_ms": percentile_ms(0.5),
        "p99_ms": percentile_ms(0.99),
    }


async def play(document: dict[str, Any], body: bytes) -> dict[str, float]:
    """Plays what a document of the command line says, and returns the outcome."""

    async def opened() -> Plays:
        if document["protocol"] == "grpc":
            return await GrpcConnection.open(document, body)
        return await HttpConnection.open(document, body)

    return await played(opened, document["connections"], document["count"], document["least_bytes"])


def main() -> None:
    """Plays what the command line says, and prints the outcome."""
    document, body = json.loads(sys.argv[1]), Path(sys.argv[2]).read_bytes()
    try:
        import uvloop
    except ImportError:
        outcome = asyncio.run(play(document, body))
    else:
        outcome = uvloop.run(play(document, body))
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
