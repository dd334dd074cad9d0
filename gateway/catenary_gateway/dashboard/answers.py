"""Answers kept for a moment, each asked for by one caller at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from catenary_services.errors import CatenaryError

MAX_AGE_NS = 900_000_000
"""Just below the interval at which pages ask."""
MAX_ERROR_AGE_NS = 500_000_000
_SMALL_BYTES = 1_400
"""What fits one packet is not compressed."""
_FAST = 1

Make = Callable[[], Awaitable[Callable[[], object]]]
"""Gets what is needed, and returns how to make JSON values of it, which may take a while."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON document, ready to be sent."""

    made_ns: int
    """When what it tells was true, on the monotonic clock."""
    body: bytes
    packed: bytes
    """The same by gzip; empty if that is not worth it."""


@dataclass(slots=True)
class _Kept:
    answer: JsonDocument | None = None
    error: CatenaryError | None = None
    failed_ns: int = 0
    task: asyncio.Task[JsonDocument] | None = None


@dataclass(slots=True)
class DocumentCache:
    """Keeps the latest answer of each kind; whoever asks meanwhile gets that one.

    Names of kinds come from us and never from callers, so there are few.
    """

    max_age_ns: int = MAX_AGE_NS
    max_error_age_ns: int = MAX_ERROR_AGE_NS
    clock: Callable[[], int] = time.monotonic_ns
    _kept: dict[str, _Kept] = field(default_factory=dict)

    async def get(self, kind: str, make: Make) -> JsonDocument:
        """Returns an answer that is not older than `max_age_ns`, made by `make` if need be.

        Raises:
            CatenaryError: as `make` does; an error is kept for a moment as well.
        """
        kept = self._kept.setdefault(kind, _Kept())
        now_ns = self.clock()
        if kept.answer is not None and now_ns - kept.answer.made_ns < self.max_age_ns:
            return kept.answer
        if kept.error is not None and now_ns - kept.failed_ns < self.max_error_age_ns:
            raise kept.error.with_traceback(None)
        if kept.task is None:
            kept.task = asyncio.create_task(self._make(kept, make), name=f"dashboard-{kind}")
        # Nobody who goes away takes the answer from the others.
        return await asyncio.shield(kept.task)

    async def close(self) -> None:
        """Cancels what is under way, and with it whoever waits."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, kept: _Kept, make: Make) -> JsonDocument:
        try:
            asked_ns = self.clock()
            values = await make()
            # Large answers take milliseconds, which requests on this loop would wait for.
            kept.answer = await asyncio.to_thread(_written, values, asked_ns)
            kept.error = None
            return kept.answer
        except CatenaryError as error:
            kept.error, kept.failed_ns = error, self.clock()
            raise
        finally:
            kept.task = None


def _written(values: Callable[[], object], made_ns: int) -> JsonDocument:
    body = json.dumps(values(), separators=(",", ":"), allow_nan=False).encode()
    packed = gzip.compress(body, _FAST) if len(body) > _SMALL_BYTES else b""
    return JsonDocument(made_ns, body, packed)
