"""Lent memory: how a part of a cache passes to another process of the host without a copy between.

The lender gathers rows into memory that it has allocated for one borrower, which maps it and copies
them to its own slots. What the memory is, and how another process gets at it, is for the executors
to say (`catenary_agent.decoders.transfers.lent_memory`).
"""

from __future__ import annotations

from typing import Any, Protocol

from catenary_agent.kv.span import CacheSpan


class LentMemory(Protocol):
    """Memory of one process that another one reads."""

    nbytes: int
    handle: bytes
    """The bytes by which another process opens it; empty if it is of another process itself."""

    @property
    def tensor(self) -> Any:
        """The bytes as the library of the executor sees them."""
        ...

    def put(self, data: bytes) -> None:
        """Writes bytes at the beginning, and waits until others can read them."""
        ...

    def get(self, nbytes: int) -> bytes:
        """Returns bytes of the beginning."""
        ...

    def close(self) -> None:
        """Gives the memory back, or lets go of that of another process; idempotent."""
        ...


class MemorySource(Protocol):
    """The memory of one device, as far as processes of one host can share it."""

    way: str
    """The kind of memory, for messages and metrics: "host" or "cuda"."""
    place: str
    """The host or the device that has it, by an id that is the same in all processes."""

    def make(self, nbytes: int) -> LentMemory:
        """Allocates memory for another process to read.

        Raises:
            Unavailable: There is no such memory left, or none that can be shared.
        """
        ...

    def open(self, handle: bytes, nbytes: int, place: str) -> LentMemory:
        """Opens memory of another process.

        Args:
            handle: What its owner has said of it.
            nbytes: Its size.
            place: Where it is.

        Raises:
            Unavailable: It cannot be reached from here, or is not what was said.
        """
        ...


class CacheLending(Protocol):
    """The ability of an executor to write caches to lent memory, and to read them from there."""

    @property
    def memory(self) -> MemorySource:
        """The memory of the device that has its caches."""
        ...

    def lend_cache(self, session: int, span: CacheSpan, target: LentMemory) -> str:
        """Writes keys and values to the beginning of lent memory, and waits until they are there.

        They are laid out as `DecoderExecutor.export_cache` returns them.

        Args:
            session: An open session.
            span: Blocks that it runs through here, and tokens that it has cached.
            target: Memory that is large enough.

        Returns:
            Their datatype; see `catenary_agent.kv.arrays`.

        Raises:
            InvalidInput: The session is not open or has no such rows.
        """
        ...

    def borrow_cache(
        self, session: int, span: CacheSpan, datatype: str, source: LentMemory
    ) -> None:
        """Writes keys and values of lent memory to a session's slots, and waits until it is done.

        The session then has as many tokens cached as `DecoderExecutor.import_cache` says.

        Args:
            session: An open session.
            span: Blocks that it runs through here, and tokens that there is room for.
            datatype: What `lend_cache` returned.
            source: The memory.

        Raises:
            InvalidInput: The session is not open or has no such room, or the datatype is unknown.
        """
        ...
