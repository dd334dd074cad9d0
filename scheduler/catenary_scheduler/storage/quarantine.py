"""Quarantine of unreadable state: moved out of the way, into a bounded stream, and reported.

Nothing here decides what is unreadable. Everything is done in Lua, for two reasons: a script that
finds damage while writing must be able to repair it in the same step, and putting a record away
must not come between a reader and its lease. Commands that an older ACL file does not grant are
tried and done without: then less of a value is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from catenary_scheduler.storage.keys import RedisKeys
from catenary_scheduler.storage.script import RedisScript
from catenary_scheduler.storage.values.tables import RecordDamage
from catenary_services.domain.groups import FARTHEST_EPOCH, HIGHEST_GRANTED
from catenary_services.errors import StaleEpoch

ENTRIES_KEPT = 512
LARGEST_KEPT_BYTES = 4096
"""Bytes kept of each value."""
_NAMED = 16
"""Number of fields that an event names one by one."""
_PER_CALL = 256

# put_away(key, shelf, events, name, why): moves a whole key into the quarantine stream; of a text
# the first part is kept, of anything else the output of DUMP if it is small.
# valid_epoch(raw): the number, or nil if raw cannot be an epoch.
# holds(lease, epoch, token, own, shelf, events): 1 if lease and epoch are ours, 0 if not, 2 if they
# are but the epoch was spoiled: the holder of the lease knows its epoch, so it is restored.
PRELUDE = f"""
local function shelve(shelf, ...)
  local done = redis.pcall('XADD', shelf, 'MAXLEN', '{ENTRIES_KEPT}', '*', ...)
  if type(done) == 'table' and done.err and string.find(done.err, 'WRONGTYPE') then
    redis.call('DEL', shelf)
    redis.pcall('XADD', shelf, 'MAXLEN', '{ENTRIES_KEPT}', '*', ...)
  end
end
local function tell(events, ...)
  local done = redis.pcall('XADD', events, 'MAXLEN', '~', '5000', '*', ...)
  return type(done) ~= 'table'
end
local function put_away(key, shelf, events, name, why)
  local kind = redis.pcall('TYPE', key)
  kind = type(kind) == 'table' and kind.ok or 'unknown'
  if kind == 'none' then
    return
  end
  local value, size = '', redis.pcall('MEMORY', 'USAGE', key)
  if kind == 'string' then
    value = redis.pcall('GETRANGE', key, 0, {LARGEST_KEPT_BYTES - 1})
  elseif type(size) == 'number' and size <= {16 * LARGEST_KEPT_BYTES} then
    value = redis.pcall('DUMP', key)
  end
  shelve(shelf, 'table', name, 'name', '', 'why', why, 'type', kind,
    'size', type(size) == 'number' and size or 0, 'value', type(value) == 'string' and value or '')
  local gone = redis.pcall('UNLINK', key)
  if type(gone) == 'table' then
    redis.call('DEL', key)
  end
  if key ~= events then
    tell(events, 'kind', 'quarantined', 'table', name, 'names', '', 'count', '1', 'why', why)
  end
end
local function valid_epoch(raw)
  if type(raw) ~= 'string' or #raw > 13 or not string.match(raw, '^%d+$') then
    return nil
  end
  local epoch = tonumber(raw)
  return epoch <= {HIGHEST_GRANTED} and epoch or nil
end
local function is_near(one, other)
  return math.abs(one - other) <= {FARTHEST_EPOCH}
end
local function holds(lease, epoch, token, own, shelf, events)
  if redis.pcall('GET', lease) ~= token then
    return 0
  end
  local raw = redis.pcall('GET', epoch)
  if raw == own then
    return 1
  end
  local found = valid_epoch(raw)
  if found and is_near(found, tonumber(own)) then
    return 0
  end
  if raw then
    put_away(epoch, shelf, events, 'epoch', 'is no epoch')
  end
  redis.call('SET', epoch, own)
  return raw and 2 or 1
end
"""

# KEYS: lease, epoch, quarantine, events, the table. ARGV: token ("": no lease is required), epoch,
# name of the table, facts of the event in JSON (or the reason, for a whole key), then name, why,
# size and value of each field.
_PUT_AWAY = RedisScript(
    PRELUDE
    + """
if ARGV[1] ~= '' and holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], KEYS[3], KEYS[4]) == 0 then
  return 0
end
if #ARGV == 4 then
  put_away(KEYS[5], KEYS[3], KEYS[4], ARGV[3], ARGV[4])
  return 1
end
for i = 5, #ARGV, 4 do
  shelve(KEYS[3], 'table', ARGV[3], 'name', string.sub(ARGV[i], 1, 512), 'why', ARGV[i + 1],
    'type', 'field', 'size', ARGV[i + 2], 'value', ARGV[i + 3])
  redis.pcall('HDEL', KEYS[5], ARGV[i])
end
local facts = cjson.decode(ARGV[4])
if not tell(KEYS[4], unpack(facts)) then
  put_away(KEYS[4], KEYS[3], KEYS[4], 'events', 'is not a stream')
  tell(KEYS[4], unpack(facts))
end
return 1
"""
)


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Token and epoch of the lease under which records are put away; empty: none is required."""

    token: str = ""
    epoch: int = 0


class RecordQuarantine:
    """Puts away records of one cluster that are unreadable; connection errors are redis-py's."""

    def __init__(self, redis: Redis, keys: RedisKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def put_away(self, damage: Sequence[RecordDamage], holder: LeaseHolder) -> None:
        """Moves damaged fields and keys into the quarantine, with an event for each table.

        Raises:
            StaleEpoch: Somebody else holds the lease.
        """
        for table in dict.fromkeys(each.table for each in damage):
            mine = [each for each in damage if each.table == table]
            for whole in (each for each in mine if not each.name):
                await self._run(holder, table, [whole.why])
            fields = [each for each in mine if each.name]
            for first in range(0, len(fields), _PER_CALL):
                part = fields[first : first + _PER_CALL]
                await self._run(holder, table, [_event(table, part), *_arguments(part)])

    async def _run(self, holder: LeaseHolder, table: str, arguments: list[bytes | str]) -> None:
        keys = self._keys
        names = [keys.lease, keys.epoch, keys.quarantine, keys.events, keys.table(table)]
        head: list[bytes | str] = [holder.token, str(holder.epoch), table]
        if await _PUT_AWAY.run(self._redis, names, [*head, *arguments]) != 1:
            raise StaleEpoch(f"epoch {holder.epoch} no longer holds the lease")


def described(damage: Sequence[RecordDamage]) -> str:
    """Returns the first names of damaged fields for people, and how many more there are."""
    names = [each.name.decode(errors="replace")[:80] for each in damage[:_NAMED]]
    rest = len(damage) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest else "")


def _event(table: str, damage: Sequence[RecordDamage]) -> str:
    facts = {
        "kind": "quarantined",
        "table": table,
        "names": described(damage),
        "count": str(len(damage)),
        "why": damage[0].why[:200],
    }
    return json.dumps([text for pair in facts.items() for text in pair])


def _arguments(damage: Sequence[RecordDamage]) -> list[bytes | str]:
    return [
        text
        for each in damage
        for text in (
            each.name,
            each.why[:200],
            str(each.size),
            each.value[:LARGEST_KEPT_BYTES],
        )
    ]
