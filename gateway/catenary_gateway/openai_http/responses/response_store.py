"""Responses that are kept for a while: to be continued, and read again, by the key that made them.

They are kept in this gateway's memory, so another gateway does not have them, and a restart loses
them. What is too old or too much is dropped, the oldest first, of the key that holds the most.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from catenary_gateway.generation.forms.conversations import Message

_OVERHEAD_BYTES = 2048
"""The memory that a kept response takes beside its texts."""
_SHARE = 8
"""A response may take this part of all room; a larger one is not kept."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that is kept, with the conversation that it ends."""

    document: dict[str, Any]
    messages: Sequence[Message]
    nbytes: int
    until_s: float = 0.0

    @classmethod
    def of(cls, document: dict[str, Any], messages: Sequence[Message]) -> StoredResponse:
        """Returns a response with the bytes that it takes."""
        size = len(msgspec.json.encode(document)) + len(msgspec.json.encode(messages))
        return cls(document, messages, size + _OVERHEAD_BYTES)


class ResponseStore:
    """The responses of all keys at one gateway; each key sees its own."""

    def __init__(
        self, most_bytes: int, kept_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes = most_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        """The responses by key and id, the oldest of each key first."""
        self._bytes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return sum(self._bytes.values())

    def has_room(self, stored: StoredResponse) -> bool:
        """Returns whether a response is small enough to be kept at all."""
        return stored.nbytes * _SHARE <= self._most_bytes

    def keep(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response that has room; others may be dropped for it."""
        self._expire()
        until_s = self._clock() + self._kept_s
        timed = StoredResponse(stored.document, stored.messages, stored.nbytes, until_s)
        self._kept.setdefault(owner, OrderedDict())[response_id] = timed
        self._bytes[owner] = self._bytes.get(owner, 0) + stored.nbytes
        while self.nbytes > self._most_bytes:
            largest = max(self._bytes, key=lambda name: self._bytes[name])
            self._drop(largest, next(iter(self._kept[largest])))

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response of a key; None if it is not kept, or is another key's."""
        self._expire()
        kept = self._kept.get(owner)
        return None if kept is None else kept.get(response_id)

    def drop(self, owner: str, response_id: str) -> bool:
        """Drops a response of a key; returns False if it is not kept, or is another key's."""
        found = self.find(owner, response_id) is not None
        if found:
            self._drop(owner, response_id)
        return found

    def _expire(self) -> None:
        now_s = self._clock()
        for owner in list(self._kept):
            while owner in self._kept:
                oldest, stored = next(iter(self._kept[owner].items()))
                if stored.until_s > now_s:
                    break
                self._drop(owner, oldest)

    def _drop(self, owner: str, response_id: str) -> None:
        kept = self._kept[owner]
        self._bytes[owner] -= kept.pop(response_id).nbytes
        if not kept:
            del self._kept[owner], self._bytes[owner]
