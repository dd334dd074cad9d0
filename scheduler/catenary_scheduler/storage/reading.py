"""Reads hashes of any content page by page, without fetching values larger than are ever written.

A server with an older ACL file may not grant the script that this takes; then a hash is read in one
piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from catenary_scheduler.storage.quarantine import LARGEST_KEPT_BYTES
from catenary_scheduler.storage.script import pass_cancellation
from catenary_scheduler.storage.values.codec import LARGEST_VALUE_BYTES
from catenary_scheduler.storage.values.tables import RecordDamage

MOST_FIELDS: Final = 200_000
"""The most fields of one table. A larger table was not written by a scheduler: the size of a
cluster bounds every table."""
_LONGEST_NAME: Final = 4096
_PAGE: Final = 1_000
_KEYS_PER_TURN: Final = 64

# KEYS: a hash. ARGV: cursor, fields per page, largest value, bytes wanted of a larger one. Returns
# the type of the key, the next cursor, then name, value and size of each field.
_PAGE_OF_HASH = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' then
  return {kind, '0', {}}
end
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local found = {}
for i = 1, #page[2], 2 do
  local name, value = page[2][i], page[2][i + 1]
  local size = #value
  if size > tonumber(ARGV[3]) then
    value = string.sub(value, 1, tonumber(ARGV[4]))
  end
  found[#found + 1] = name
  found[#found + 1] = value
  found[#found + 1] = size
end
return {kind, page[1], found}
"""


@dataclass(slots=True)
class RawTable:
    """The fields of one hash that have an acceptable size, and the damage found in it."""

    table: str
    fields: dict[bytes, bytes] = field(default_factory=dict)
    damage: list[RecordDamage] = field(default_factory=list)


async def read_hashes(redis: Redis, keys: Mapping[str, str]) -> dict[str, RawTable]:
    """Reads the hashes under these keys; both mappings are by name of the table."""
    found = {table: RawTable(table) for table in keys}
    cursors: dict[str, bytes] = dict.fromkeys(keys, b"0")
    while cursors:
        turn = list(cursors)[:_KEYS_PER_TURN]
        async with redis.pipeline(transaction=False) as pipeline:
            for table in turn:
                pipeline.eval(
                    _PAGE_OF_HASH,
                    1,
                    keys[table],
                    cursors[table],
                    _PAGE,
                    LARGEST_VALUE_BYTES,
                    LARGEST_KEPT_BYTES,
                )
            answers = await pipeline.execute(raise_on_error=False)
        pass_cancellation()
        for table, answer in zip(turn, answers, strict=True):
            if isinstance(answer, ResponseError):
                await _read_whole(redis, keys[table], found[table])
                cursor = b"0"
            elif isinstance(answer, Exception):
                raise answer
            else:
                cursor = _take_page(answer, found[table])
            if cursor == b"0" or len(found[table].fields) > MOST_FIELDS:
                if cursor != b"0":
                    found[table].damage.append(RecordDamage(table, b"", "has too many fields"))
                    found[table].fields.clear()
                del cursors[table]
            else:
                cursors[table] = cursor
    return found


def _take_page(answer: Any, into: RawTable) -> bytes:
    kind, cursor, texts = cast(tuple[bytes, bytes, list[Any]], answer)
    if kind not in (b"hash", b"none"):
        into.damage.append(RecordDamage(into.table, b"", f"is a {kind.decode(errors='replace')}"))
        return b"0"
    for name, value, size in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        _take(into, name, value, size)
    return cursor


def _take(into: RawTable, name: bytes, value: bytes, size: int) -> None:
    if size > LARGEST_VALUE_BYTES or len(name) > _LONGEST_NAME:
        # The full name is kept, however long: the field is deleted by it.
        into.damage.append(RecordDamage(into.table, name, "is too large", value, size))
    else:
        into.fields[name] = value


async def _read_whole(redis: Redis, key: str, into: RawTable) -> None:
    try:
        fields = cast(dict[bytes, bytes], await redis.hgetall(key))
    except ResponseError:
        pass_cancellation()
        into.damage.append(RecordDamage(into.table, b"", "is not a hash"))
        return
    pass_cancellation()
    for name, value in fields.items():
        _take(into, name, value, len(value))
