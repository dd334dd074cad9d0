"""A transport of asyncio without a network."""

from __future__ import annotations

import asyncio
import socket
from typing import Any


class ScriptedSocket:
    """A socket whose options are of no consequence."""

    family = socket.AF_INET

    def setsockopt(self, *_: object) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.2", 2

    def fileno(self) -> int:
        return -1


class ScriptedTransport(asyncio.Transport):
    """A transport that keeps what is written, and is read from by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.reads = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"peername": ("127.0.0.2", 2), "socket": ScriptedSocket()}
        return known.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close
