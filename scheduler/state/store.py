"""A cluster's state in Redis: one fenced batch of changes in, everything out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from scheduler.state.journal import Changes
from scheduler.state.keys import Keys, Table, book_table
from scheduler.state.lease import Lease
from scheduler.state.script import Script, pass_cancellation
from services.domain.ids import Epoch, Nanoseconds, ResourceId
from services.errors import StaleEpoch

_EVENTS_KEPT = 5_000
_FIXED = frozenset(Table)
_FIELDS_PER_COMMAND = 1_000  # Lua's unpack takes a few thousand values at most

# KEYS: lease, epoch, clock, then every key the commands touch.
# ARGV: token, epoch, scheduler_ns, the scheduler_ns of our batch before (empty: any will do), then
# the commands in JSON: name, key index, arguments. One long argument costs both sides less than
# many short ones. Returns 1 if applied, 0 if the lease is not ours, -1 if the batch before is not
# here: this is a replica that was promoted without it.
# The clock pair is written by the same script, so that it is never older than the changes; a batch
# that was sent twice, because its answer was lost, is applied once.
_APPLY = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 0
end
local before = redis.call('HGET', KEYS[3], 'scheduler_ns')
if before == ARGV[3] then
  return 1
end
if ARGV[4] ~= '' and before ~= ARGV[4] then
  return -1
end
local now = redis.call('TIME')
local now_us = string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]))
redis.call('HSET', KEYS[3], 'scheduler_ns', ARGV[3], 'redis_us', now_us, 'epoch', ARGV[2])
for _, command in ipairs(cjson.decode(ARGV[5])) do
  redis.call(command[1], KEYS[command[2]], unpack(command, 3))
end
return 1
""")


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The same moment on a scheduler's monotonic clock and on Redis' wall clock."""

    scheduler_ns: Nanoseconds
    redis_us: int


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything a predecessor left behind, as text."""

    tables: dict[Table, dict[str, str]]
    book: dict[ResourceId, dict[str, str]]
    anchor: ClockAnchor | None
    """None if nothing was ever written."""
    now: ClockAnchor
    """Our own clock against Redis', taken when this was read."""


class Behind(Exception):  # noqa: N818 - what happened
    """Redis lacks what this leader wrote before; only a snapshot makes it right again."""


class Store:
    """Reads and writes one cluster. Errors of the connection pass through as redis-py's."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._books: set[str] = set()  # reservation tables that exist, for a snapshot to replace
        self._before = ""  # moment of the last batch that arrived, under this epoch
        self._epoch = Epoch(0)

    async def apply(self, lease: Lease, changes: Changes) -> None:
        """Applies a batch if `lease` is still held with its epoch, all of it or nothing.

        Raises:
            StaleEpoch: the lease is gone or somebody else's.
            Behind: an earlier batch of this leader is missing; never of a snapshot.
        """
        keys = [self._keys.lease, self._keys.epoch, self._keys.clock]
        places: dict[str, int] = {}
        commands: list[list[str | int]] = []
        for command, key, arguments in self._commands(changes):
            if key not in places:
                keys.append(key)
                places[key] = len(keys)  # Lua counts from 1
            commands.append([command, places[key], *arguments])
        if lease.epoch != self._epoch:
            self._epoch, self._before = lease.epoch, ""
        moment = str(time.monotonic_ns())
        before = "" if changes.replace else self._before
        head = [lease.token, str(lease.epoch), moment, before, json.dumps(commands)]
        answer = await _APPLY.run(self._redis, keys, head)
        if answer == -1:
            raise Behind
        if answer != 1:
            raise StaleEpoch(f"epoch {lease.epoch} no longer holds the lease")
        self._before = moment

    def _commands(self, changes: Changes) -> Iterator[tuple[str, str, list[str]]]:
        if changes.replace:
            for name in (*Table, *self._books):
                yield "DEL", self._keys.table(name), []
        for table, fields in changes.tables.items():
            if table not in _FIXED:
                self._books.add(table)
            key = self._keys.table(table)
            pairs = [text for name, value in fields.items() if value is not None
                     for text in (name, value)]  # fmt: skip
            gone = [name for name, value in fields.items() if value is None]
            yield from (("HSET", key, part) for part in _parts(pairs))
            yield from (("HDEL", key, part) for part in _parts(gone))
        for facts in changes.events:
            flat = [text for pair in facts.items() for text in pair]
            yield "XADD", self._keys.events, ["MAXLEN", "~", str(_EVENTS_KEPT), "*", *flat]

    async def load(self) -> StoredState:
        """Returns what is stored, and how our clock stands to Redis' at this moment."""
        fixed = await self._hashes([*map(self._keys.table, Table), self._keys.clock])
        tables = dict(zip(Table, fixed[:-1], strict=True))
        clock = fixed[-1]
        resources = [ResourceId(name) for name in tables[Table.RESOURCES]]
        names = [book_table(resource) for resource in resources]
        self._books.update(names)
        books = await self._hashes([self._keys.table(name) for name in names])
        anchor = ClockAnchor(int(clock["scheduler_ns"]), int(clock["redis_us"])) if clock else None
        now = await self.read_clock()
        return StoredState(tables, dict(zip(resources, books, strict=True)), anchor, now)

    async def _hashes(self, keys: list[str]) -> list[dict[str, str]]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hgetall(key)
            answers = cast(list[dict[bytes | str, bytes | str]], await pipeline.execute())
        pass_cancellation()
        return [_texts(answer) for answer in answers]

    async def read_clock(self) -> ClockAnchor:
        """Returns this moment on both clocks, right to half a round trip."""
        before = time.monotonic_ns()
        seconds, micros = await self._redis.time()
        pass_cancellation()
        middle = (before + time.monotonic_ns()) // 2
        return ClockAnchor(middle, int(seconds) * 1_000_000 + int(micros))


def _parts(texts: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(texts), _FIELDS_PER_COMMAND):
        yield texts[first : first + _FIELDS_PER_COMMAND]


def _texts(answer: dict[bytes | str, bytes | str]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in answer.items()}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
