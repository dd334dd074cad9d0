"""Examines the store of a cluster from outside, and puts away what no scheduler could use.

A scheduler does the same when it begins to lead. This module is for a store that is to be examined
before one starts, and for clusters of older schedulers, which cannot do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from catenary_scheduler.storage.keys import RedisKeys
from catenary_scheduler.storage.quarantine import LARGEST_KEPT_BYTES, LeaseHolder, RecordQuarantine
from catenary_scheduler.storage.store import Store
from catenary_scheduler.storage.values.tables import RecordDamage
from catenary_services.domain.groups import FARTHEST_EPOCH, HIGHEST_GRANTED

_NO_EXPIRY: Final = -1


@dataclass(frozen=True, slots=True)
class StoreExamination:
    """Contents of a store that cannot be used, and who leads.

    Attributes:
        damage: Every damaged record, with the reason.
        leader: Token of the scheduler that leads; empty if none does.
        epoch: The epoch; None if it is unreadable or there is none.
        quarantined: Number of entries in the quarantine.
    """

    damage: tuple[RecordDamage, ...]
    leader: str
    epoch: int | None
    quarantined: int


async def examine(redis: Redis, keys: RedisKeys) -> StoreExamination:
    """Examines everything stored under `keys`; changes nothing."""
    damage: list[RecordDamage] = []
    last = await _last_epoch(redis, keys)
    epoch, why = _epoch_of(await _text(redis, keys.epoch, "epoch", damage), last)
    if why:
        damage.append(why)
    leader = await _text(redis, keys.lease, "lease", damage)
    if leader is not None and await redis.pttl(keys.lease) == _NO_EXPIRY:
        damage.append(RecordDamage("lease", b"", "would never end", leader, len(leader)))
        leader = None
    await _text(redis, keys.wanted, "wanted", damage)
    for key, table in ((keys.events, "events"), (keys.quarantine, "quarantine")):
        if (kind := await _kind(redis, key)) not in ("stream", "none"):
            damage.append(RecordDamage(table, b"", f"is a {kind}, not a stream"))
    stored = await Store(redis, keys).load()
    damage += stored.damage
    is_stream = not any(each.table == "quarantine" for each in damage)
    return StoreExamination(
        tuple(damage),
        leader.decode(errors="replace") if leader is not None else "",
        epoch,
        await redis.xlen(keys.quarantine) if is_stream else 0,
    )


async def put_away(redis: Redis, keys: RedisKeys, damage: Sequence[RecordDamage]) -> None:
    """Moves the damaged records into the quarantine, whoever leads.

    The next leader takes an epoch above that of the last batch, and above what agents obey.
    """
    own = [each for each in damage if each.table == "quarantine"]
    if own:  # the stream cannot be put into itself
        await redis.delete(keys.quarantine)
    rest = [each for each in damage if each.table != "quarantine"]
    await RecordQuarantine(redis, keys).put_away(rest, LeaseHolder())


async def _kind(redis: Redis, key: str) -> str:
    found = await redis.type(key)
    return found.decode() if isinstance(found, bytes) else str(found)


async def _text(redis: Redis, key: str, table: str, damage: list[RecordDamage]) -> bytes | None:
    kind = await _kind(redis, key)
    if kind == "none":
        return None
    if kind != "string":
        damage.append(RecordDamage(table, b"", f"is a {kind}, not a text"))
        return None
    return _bytes(await redis.getrange(key, 0, LARGEST_KEPT_BYTES - 1))


async def _last_epoch(redis: Redis, keys: RedisKeys) -> int | None:
    try:
        found = await redis.hget(keys.clock, "epoch")
    except ResponseError:
        return None
    return None if found is None else _number(_bytes(found))


def _epoch_of(raw: bytes | None, last: int | None) -> tuple[int | None, RecordDamage | None]:
    if raw is None:
        return None, None
    epoch = _number(raw)
    if epoch is None:
        return None, RecordDamage("epoch", b"", "is no epoch", raw, len(raw))
    if last is not None and abs(epoch - last) > FARTHEST_EPOCH:
        why = f"is too far from {last}, the epoch of the last batch"
        return None, RecordDamage("epoch", b"", why, raw, len(raw))
    return epoch, None


def _bytes(answer: bytes | str) -> bytes:
    return answer.encode() if isinstance(answer, str) else answer


def _number(raw: bytes) -> int | None:
    if len(raw) > 13 or not raw.isdigit():
        return None
    return int(raw) if int(raw) <= HIGHEST_GRANTED else None
