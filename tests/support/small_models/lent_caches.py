"""Caches in lent memory: a process that borrows, and a stand-in for executors without weights.

The process is told one thing after another on its standard input, as JSON lines, and answers each
with a line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.kv import CacheSpan, array_of_payload
from catenary_services.errors import Unavailable

_ROOT = Path(__file__).resolve().parents[3]
HEADS, HEAD_SIZE, SLOTS, TOKENS = 2, 8, 12, 64


class BorrowingProcess:
    """Another process, which opens memory of this one."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-m", __name__, device]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(self, what: str, **values: Any) -> Any:
        """Returns the answer to something."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the borrowing process has ended"
        return json.loads(line)

    def open(self, memory: Any, place: str, handle: bytes = b"") -> Any:
        """Has memory opened; returns the digest of its bytes, or why it cannot be read."""
        encoded = base64.b64encode(handle or memory.handle).decode()
        return self.ask("open", handle=encoded, nbytes=memory.nbytes, place=place)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def borrowing(device: str) -> Iterator[BorrowingProcess]:
    """Runs a process that borrows."""
    process = BorrowingProcess(device)
    try:
        yield process
    finally:
        process.close()


def pool_of(device: str, dtype: str) -> tuple[Any, Any]:
    """Returns a pool of caches, and the rows of one session, which has all of them."""
    import torch

    from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape

    shape = TokenCacheShape(HEADS, HEAD_SIZE, getattr(torch, dtype), torch.device(device))
    pool = CachePool(SLOTS * TOKENS, TOKENS, SLOTS, shape)
    pool.keys.zero_()
    pool.values.zero_()
    return pool, pool.opened([TOKENS])[0]


class _Borrower:
    """What the process does."""

    def __init__(self, device: str) -> None:
        import torch

        from catenary_agent.decoders.transfers.lent_memory import memory_of

        self._device = device
        self._source = memory_of(torch.device(device))
        self._memory: Any = None

    def make(self, nbytes: int) -> dict[str, str]:
        """Lends memory itself."""
        self._memory = self._source.make(nbytes)
        handle = base64.b64encode(self._memory.handle).decode()
        return {"handle": handle, "place": self._source.place}

    def open(self, handle: str, nbytes: int, place: str) -> str:
        try:
            self._memory = self._source.open(base64.b64decode(handle), nbytes, place)
        except Unavailable as error:
            return f"no: {error.message}"
        return self.digest()

    def digest(self) -> str:
        return hashlib.sha256(self._memory.get(self._memory.nbytes)).hexdigest()

    def borrow(self, span: list[int], datatype: str, dtype: str) -> list[Any]:
        """Takes a part into a pool of its own; returns the rows of it."""
        pool, cache = pool_of(self._device, dtype)
        part = CacheSpan(*span)
        pool.borrow(cache, part, 0, self._memory.tensor, datatype)
        rows = pool.read(cache, part, 0)
        return [rows.dtype.name, rows.shape, hashlib.sha256(rows.tobytes()).hexdigest()]

    def close(self) -> str:
        self._memory.close()
        return "closed"


class ToyMemory:
    """Lent memory of a world without processes."""

    def __init__(self, handle: bytes, data: bytearray, owned: set[bytes]) -> None:
        self.nbytes, self.handle, self.tensor = len(data), handle, data
        self._owned = owned

    def put(self, data: bytes) -> None:
        self.tensor[: len(data)] = data

    def get(self, nbytes: int) -> bytes:
        return bytes(self.tensor[:nbytes])

    def close(self) -> None:
        self._owned.discard(self.handle)


class ToyLending:
    """The lending of a decoder that exports and imports arrays; see `CacheLending`.

    Attributes:
        memories: Everything that was ever lent in a world, by its handle.
        owned: The handles of what was not given back, and of what is open.
        fails: What fails: "make", "open", "mark", "lend" or "borrow".
    """

    way = "toy"

    def __init__(self, decoder: Any, memories: dict[bytes, bytearray], place: str = "here") -> None:
        self.decoder = decoder
        self.memories = memories
        self.place = place
        self.owned: set[bytes] = set()
        self.fails: set[str] = set()
        self.borrowed = 0
        """Number of pieces that were read."""

    @property
    def memory(self) -> ToyLending:
        return self

    def make(self, nbytes: int) -> ToyMemory:
        self._maybe_fail("make")
        handle = f"{self.place}-{len(self.memories)}".encode()
        return self._held(handle, self.memories.setdefault(handle, bytearray(nbytes)))

    def open(self, handle: bytes, nbytes: int, place: str) -> ToyMemory:
        self._maybe_fail("open")
        if place != self.place or len(self.memories.get(handle, b"")) != nbytes:
            raise Unavailable("it is elsewhere")
        data = self.memories[handle]
        return self._held(handle, bytearray(nbytes) if "mark" in self.fails else data)

    def lend_cache(self, session: int, span: CacheSpan, target: Any) -> str:
        self._maybe_fail("lend")
        target.put(self.decoder.export_cache(session, span).tobytes())
        return "FP32"

    def borrow_cache(self, session: int, span: CacheSpan, datatype: str, source: Any) -> None:
        self._maybe_fail("borrow")
        row = (self.decoder.table.key_value_heads, self.decoder.table.head_size)
        nbytes = 8 * span.blocks * span.tokens * int(np.prod(row))
        data = memoryview(bytes(source.tensor[:nbytes]))
        self.decoder.import_cache(session, span, array_of_payload(data, datatype, span, row))
        self.borrowed += 1

    def _maybe_fail(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"{what} fails")

    def _held(self, handle: bytes, data: bytearray) -> ToyMemory:
        self.owned.add(handle)
        return ToyMemory(handle, data, self.owned)


def _main() -> None:
    borrower = _Borrower(sys.argv[1])
    for line in sys.stdin:
        values = json.loads(line)
        print(json.dumps(getattr(borrower, values.pop("what"))(**values)), flush=True)


if __name__ == "__main__":
    _main()
