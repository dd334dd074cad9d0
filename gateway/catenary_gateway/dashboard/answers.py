"""A cache of the dashboard's answers, in which each answer is made for one caller at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from catenary_services.errors import CatenaryError

MAX_AGE_NS = 900_000_000
"""Age in nanoseconds up to which an answer is sent again, just below the interval at which pages
ask."""
MAX_ERROR_AGE_NS = 500_000_000
_SMALL_BYTES = 1_400
"""Bodies up to this size are not compressed, because they fit into one packet."""
_FAST = 1

Make = Callable[[], Awaitable[Callable[[], object]]]
"""A function that awaits the data of an answer. It returns a second function, which makes JSON
values of the data and may take so long that it needs a thread."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON document in the form in which it is sent."""

    made_ns: int
    """Time on the monotonic clock at which its data were requested."""
    body: bytes
    packed: bytes
    """The body compressed by gzip; empty if it is too small for that."""


@dataclass(slots=True)
class _Kept:
    answer: JsonDocument | None = None
    error: CatenaryError | None = None
    failed_ns: int = 0
    task: asyncio.Task[JsonDocument] | None = None


@dataclass(slots=True)
class DocumentCache:
    """A cache of the latest answer of each kind, shared by all callers.

    Names of kinds come from this package and never from callers, so there are few.
    """

    max_age_ns: int = MAX_AGE_NS
    max_error_age_ns: int = MAX_ERROR_AGE_NS
    clock: Callable[[], int] = time.monotonic_ns
    _kept: dict[str, _Kept] = field(default_factory=dict)

    async def get(self, kind: str, make: Make) -> JsonDocument:
        """Returns an answer not older than `max_age_ns`, made by `make` if there is none.

        Raises:
            CatenaryError: `make` raised it, now or less than `max_error_age_ns` ago.
        """
        kept = self._kept.setdefault(kind, _Kept())
        now_ns = self.clock()
        if kept.answer is not None and now_ns - kept.answer.made_ns < self.max_age_ns:
            return kept.answer
        if kept.error is not None and now_ns - kept.failed_ns < self.max_error_age_ns:
            raise kept.error.with_traceback(None)
        if kept.task is None:
            kept.task = asyncio.create_task(self._make(kept, make), name=f"dashboard-{kind}")
        # A caller that is cancelled must not cancel the answer that others wait for.
        return await asyncio.shield(kept.task)

    async def close(self) -> None:
        """Cancels all answers that are being made, and with them their callers."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, kept: _Kept, make: Make) -> JsonDocument:
        try:
            asked_ns = self.clock()
            values = await make()
            # Writing a large answer takes milliseconds, which would delay requests on this loop.
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
