"""The state of a cluster in Redis: one fenced batch of changes in, everything out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.book import Reservation
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.storage.journal import JournalChanges
from catenary_scheduler.storage.keys import RedisKeys, RedisTable, book_table
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.quarantine import PRELUDE, LeaseHolder, RecordQuarantine
from catenary_scheduler.storage.reading import read_hashes
from catenary_scheduler.storage.script import RedisScript, ScriptConnection, pass_cancellation
from catenary_scheduler.storage.values.codec import UnreadableRecord
from catenary_scheduler.storage.values.records import believable, measurements_of
from catenary_scheduler.storage.values.stored import (
    DeploymentSpec,
    Hops,
    StoredAgent,
    StoredMeasurements,
    StoredPlan,
)
from catenary_scheduler.storage.values.tables import (
    SHAPES,
    RecordDamage,
    book_shape,
    read_clock,
    read_table,
)
from catenary_services.domain.ids import (
    AgentId,
    Epoch,
    ModelKey,
    Nanoseconds,
    ResourceId,
    SessionId,
)
from catenary_services.errors import StaleEpoch

_EVENTS_KEPT = 5_000
_FIXED = frozenset(RedisTable)
_FIELDS_PER_COMMAND = 1_000  # Lua's unpack takes a few thousand values at most

# KEYS: lease, epoch, clock, quarantine, events, then every key the commands touch. ARGV: token,
# epoch, scheduler_ns, the scheduler_ns of our previous batch (empty: not checked), the length of
# the prefix of all keys, then the commands in JSON: name, key index, arguments. One long argument
# costs both sides less than many short ones. Returns 1 if the batch was applied, 0 if the lease is
# not ours, -1 if the previous batch is not here: this is a replica that was promoted without it; 2
# if it was applied but a key had to be put away first, so that its other fields are only in our
# memory. The clock pair is written by the same script, so that it is never older than the changes;
# a batch that was sent twice, because its answer was lost, is applied once.
_APPLY = RedisScript(
    PRELUDE
    + """
if holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], KEYS[4], KEYS[5]) == 0 then
  return 0
end
local applied = 1
local function spoiled(key)
  put_away(key, KEYS[4], KEYS[5], string.sub(key, tonumber(ARGV[5]) + 1), 'is of another type')
  applied = 2
end
local function run(name, key, ...)
  if name == 'DEL' then
    local kind = redis.pcall('TYPE', key)
    if kind.ok and kind.ok ~= 'hash' and kind.ok ~= 'none' then
      spoiled(key)
    end
  end
  local done = redis.pcall(name, key, ...)
  if type(done) == 'table' and done.err and string.find(done.err, 'WRONGTYPE') then
    spoiled(key)
    done = redis.pcall(name, key, ...)
  end
  return type(done) == 'table' and done.err and done
end
local before = redis.pcall('HGET', KEYS[3], 'scheduler_ns')
if before == ARGV[3] then
  return 1
end
if type(before) ~= 'table' and ARGV[4] ~= '' and before ~= ARGV[4] then
  return -1
end
local now = redis.call('TIME')
local now_us = string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]))
local failed = run(
  'HSET', KEYS[3], 'scheduler_ns', ARGV[3], 'redis_us', now_us, 'epoch', ARGV[2])
for _, command in ipairs(cjson.decode(ARGV[6])) do
  if failed then
    return failed
  end
  failed = run(command[1], KEYS[command[2]], unpack(command, 3))
end
if failed then
  return failed
end
return applied
"""
)


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The same moment on a scheduler's monotonic clock and on Redis' wall clock."""

    scheduler_ns: Nanoseconds
    redis_us: int


@dataclass(frozen=True, slots=True)
class StoredState:
    """The readable state that an earlier scheduler left behind."""

    now: ClockAnchor
    """Our own clock against Redis', taken when this was read."""
    anchor: ClockAnchor | None = None
    """Clock of that scheduler against Redis' at its last write; None if nothing was ever
    written."""
    deployments: Mapping[str, DeploymentSpec] = field(default_factory=dict)
    plan: StoredPlan = field(default_factory=StoredPlan)
    measured: StoredMeasurements = field(default_factory=StoredMeasurements)
    agents: Mapping[str, StoredAgent] = field(default_factory=dict)
    peers: Mapping[str, common_pb2.Peer] = field(default_factory=dict)
    draining: Mapping[AgentId, int] = field(default_factory=dict)
    sessions: Mapping[SessionId, Hops] = field(default_factory=dict)
    lengths: Mapping[ModelKey, LengthPredictor] = field(default_factory=dict)
    book: Sequence[Reservation] = ()
    """All reservations, on the clock of that scheduler."""
    books: tuple[str, ...] = ()
    """Names of the reservation tables."""
    damage: tuple[RecordDamage, ...] = ()
    """The records that could not be read."""

    def without_records(self) -> StoredState:
        """Returns the state with every table declared damaged: only our clock reading is left."""
        why = "taking over failed with it"
        whole = tuple(RecordDamage(table, b"", why) for table in (*RedisTable, *self.books))
        return StoredState(self.now, damage=(*self.damage, *whole))


class StoreBehind(Exception):  # noqa: N818 - what happened
    """Redis lacks writes of this leader, and only a snapshot can update it.

    Attributes:
        why: The reason in one word, for the log.
    """

    def __init__(self, why: str = "missing") -> None:
        super().__init__(why)
        self.why = why


class Store:
    """Reads and writes the state of one cluster; connection errors are redis-py's."""

    def __init__(
        self, redis: Redis, keys: RedisKeys, spoiled: Callable[[], object] = lambda: None
    ) -> None:
        """Opens no connection.

        `spoiled` is called when a key of a wrong type had to be put away.
        """
        self._spoiled = spoiled
        self._redis = redis
        self._scripts = ScriptConnection(redis)
        self._keys = keys
        self._fixed_keys = [keys.lease, keys.epoch, keys.clock, keys.quarantine, keys.events]
        self._books: set[str] = set()  # names of the reservation tables, which a snapshot replaces
        self._before = ""  # moment of the last batch that arrived under this epoch
        self._epoch = Epoch(0)

    async def apply(self, lease: Lease, changes: JournalChanges) -> None:
        """Applies a batch as a whole if `lease` is still held with its epoch.

        Raises:
            StaleEpoch: The lease is free or somebody else's.
            StoreBehind: An earlier batch of this leader is missing; or a key of a wrong type was
                put away, so that the rest of its table is missing now.
        """
        keys = [*self._fixed_keys]
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
        own = str(len(self._keys.prefix))
        head = [lease.token, str(lease.epoch), moment, before, own, json.dumps(commands)]
        answer = await self._scripts.run(_APPLY, keys, head)
        if answer == -1:
            raise StoreBehind
        if answer not in (1, 2):
            raise StaleEpoch(f"epoch {lease.epoch} no longer holds the lease")
        self._before = moment
        if answer == 2:
            self._spoiled()
            if not changes.replace:
                raise StoreBehind("spoiled")

    def _commands(self, changes: JournalChanges) -> Iterator[tuple[str, str, list[str]]]:
        prefix = self._keys.prefix
        if changes.replace:
            for name in (*RedisTable, *self._books):
                yield "DEL", prefix + name, []
        for table, fields in changes.tables.items():
            if table not in _FIXED:
                self._books.add(table)
            key = prefix + table
            pairs = [
                text
                for name, value in fields.items()
                if value is not None
                for text in (name, value)
            ]
            gone = [name for name, value in fields.items() if value is None]
            yield from (("HSET", key, part) for part in _parts(pairs))
            yield from (("HDEL", key, part) for part in _parts(gone))
        for facts in changes.events:
            flat = [text for pair in facts.items() for text in pair]
            yield "XADD", self._keys.events, ["MAXLEN", "~", str(_EVENTS_KEPT), "*", *flat]

    async def load(self) -> StoredState:
        """Returns the stored state as far as it is readable, with both clocks read against Redis'.

        No stored content makes this fail; `put_away` removes what is damaged.
        """
        keys = self._keys
        found = await read_hashes(self._redis, {str(t): keys.table(t) for t in RedisTable})
        clock = (await read_hashes(self._redis, {"clock": keys.clock}))["clock"]
        damage = [each for raw in (*found.values(), clock) for each in raw.damage]
        tables: dict[RedisTable, Any] = {}
        for table, shape in SHAPES.items():
            tables[table], bad = read_table(table, shape, found[table].fields)
            damage += bad
        resources: list[ResourceId] = list(tables[RedisTable.RESOURCES])
        names = {book_table(each): keys.table(book_table(each)) for each in resources}
        self._books.update(names)
        anchor = _anchor_of(clock.fields, damage)
        agents = {} if _is_damaged(damage, RedisTable.AGENTS) else tables[RedisTable.AGENTS]
        book: list[Reservation] = []
        for resource, raw in zip(
            resources, (await read_hashes(self._redis, names)).values(), strict=True
        ):
            records, bad = read_table(raw.table, book_shape(resource), raw.fields)
            reservations = list(records.values())
            damage += [*raw.damage, *bad]
            if anchor is not None:
                reservations, odd = believable(reservations, resource, anchor.scheduler_ns, agents)
                damage += odd
            book += reservations
        return StoredState(
            deployments=tables[RedisTable.DEPLOYMENTS],
            plan=_plan_of(tables[RedisTable.PLAN], damage),
            measured=measurements_of(tables[RedisTable.MEASURED]),
            agents=tables[RedisTable.AGENTS],
            peers=tables[RedisTable.PEERS],
            draining=tables[RedisTable.DRAINING],
            sessions=tables[RedisTable.SESSIONS],
            lengths=tables[RedisTable.LENGTHS],
            book=book,
            anchor=anchor,
            now=await self.read_clock(),
            books=tuple(names),
            damage=tuple(damage),
        )

    async def put_away(self, damage: Sequence[RecordDamage], lease: Lease) -> None:
        """Moves what `load` could not read into the quarantine.

        Raises:
            StaleEpoch: The lease is free or somebody else's.
        """
        holder = LeaseHolder(lease.token, lease.epoch)
        await RecordQuarantine(self._redis, self._keys).put_away(damage, holder)

    async def read_clock(self) -> ClockAnchor:
        """Returns this moment on both clocks, exact to half a round trip."""
        before = time.monotonic_ns()
        seconds, micros = await self._redis.time()
        pass_cancellation()
        middle = (before + time.monotonic_ns()) // 2
        return ClockAnchor(middle, int(seconds) * 1_000_000 + int(micros))


def _parts(texts: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(texts), _FIELDS_PER_COMMAND):
        yield texts[first : first + _FIELDS_PER_COMMAND]


def _anchor_of(fields: Mapping[bytes, bytes], damage: list[RecordDamage]) -> ClockAnchor | None:
    try:
        clock = read_clock(fields)
    except UnreadableRecord as error:
        damage.append(RecordDamage("clock", b"", str(error)))
        return None
    return ClockAnchor(clock.scheduler_ns, clock.redis_us) if clock is not None else None


def _plan_of(fields: Mapping[str, Any], damage: list[RecordDamage]) -> StoredPlan:
    lost = (d.name.decode(errors="replace") for d in damage if d.table == RedisTable.PLAN)
    known = {name: value for name, value in fields.items() if value is not None}
    return StoredPlan(**known, lost=frozenset(lost))


def _is_damaged(damage: list[RecordDamage], table: str) -> bool:
    return any(each.table == table for each in damage)
