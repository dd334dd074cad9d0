"""Tables as Redis would hand them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from scheduler.state.keys import Keys, Table
from scheduler.state.tables import SHAPES, read_table


def as_raw(fields: Mapping[str, str | None]) -> dict[bytes, bytes]:
    return {name.encode(): str(value).encode() for name, value in fields.items()}


def stored_of(table: Table, fields: Mapping[str, str | None]) -> Any:
    """Returns the readable records of a table."""
    return read_table(table, SHAPES[table], as_raw(fields))[0]


async def raw_table(redis: Redis, keys: Keys, table: str) -> dict[str, str]:
    """Returns the fields of a table as they are in Redis, readable or not."""
    fields = await redis.hgetall(keys.table(table))  # type: ignore[misc]
    return {name.decode(): value.decode() for name, value in fields.items()}
