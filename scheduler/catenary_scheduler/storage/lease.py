"""The leader lease of a cluster, with a fencing epoch.

The lease alone is not safe: a leader may be paused past its expiry and then go on. So every leader
gets a higher epoch than any before it; Redis refuses batches (`store`) and agents refuse orders of
a lower epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from catenary_scheduler.storage.keys import RedisKeys
from catenary_scheduler.storage.quarantine import PRELUDE
from catenary_scheduler.storage.script import RedisScript, pass_cancellation
from catenary_services.domain.groups import EPOCH_STRIDE, is_epoch, next_epoch
from catenary_services.domain.ids import Epoch

# KEYS: lease, epoch, clock, quarantine, events. ARGV: token, ttl in ms, the epoch to exceed,
# stride, remainder, the least epoch that must be known here. Returns four numbers. First the new
# epoch, which is the next one that leaves the remainder (Lua's % is never negative); or 0 if
# somebody holds the lease, or -1 if the known epoch is too low. Then the epoch that was known, the
# ms that the holder's lease has left, and 1 if the epoch was spoiled. It is spoiled if it is no
# number, out of range, or farther than epochs go from the epoch of the last batch, which is in the
# clock hash and then counts instead. No scheduler writes a lease without an expiry; one that is
# found is given an expiry.
_ACQUIRE = RedisScript(
    PRELUDE
    + """
local last = redis.pcall('HGET', KEYS[3], 'epoch')
last = valid_epoch(last)
local raw = redis.pcall('GET', KEYS[2])
local found = raw and valid_epoch(raw) or 0
local spoiled = raw and not valid_epoch(raw)
if last and (not raw or spoiled or not is_near(found, last)) then
  spoiled = spoiled or found > last
  found = last
end
local left = redis.call('PTTL', KEYS[1])
if left == -1 then
  if type(redis.pcall('GET', KEYS[1])) == 'string' then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    left = tonumber(ARGV[2])
  else
    put_away(KEYS[1], KEYS[4], KEYS[5], 'lease', 'is no lease')
    left = -2
  end
elseif left ~= -2 and type(redis.pcall('GET', KEYS[1])) ~= 'string' then
  put_away(KEYS[1], KEYS[4], KEYS[5], 'lease', 'is no lease')
  left = -2
end
if left ~= -2 then
  return {0, found, left, 0}
end
if found < tonumber(ARGV[6]) then
  return {-1, found, 0, 0}
end
if spoiled then
  put_away(KEYS[2], KEYS[4], KEYS[5], 'epoch', 'is no epoch')
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local known = math.max(found, tonumber(ARGV[3]))
local epoch = known + 1 + (tonumber(ARGV[5]) - known - 1) % tonumber(ARGV[4])
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
return {epoch, found, 0, spoiled and 1 or 0}
"""
)

# KEYS: lease, epoch, quarantine, events. ARGV: token, ttl in ms, own epoch. Returns 0 if the lease
# is not ours, 1 if it was renewed, 2 if the epoch also had to be repaired.
_RENEW = RedisScript(
    PRELUDE
    + """
local held = holds(KEYS[1], KEYS[2], ARGV[1], ARGV[3], KEYS[3], KEYS[4])
if held ~= 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return held
"""
)

# KEYS: lease, wanted. Returns the holder's token or "", the ms it has left, and the token of the
# standby that wants the lease or "". A value that is no token counts as absent: `_ACQUIRE` and
# `want` replace it.
_LOOK = RedisScript("""
local function token(key)
  local found = redis.pcall('GET', key)
  return type(found) == 'string' and found or ''
end
local left = redis.call('PTTL', KEYS[1])
return {left == -1 and '' or token(KEYS[1]), left, token(KEYS[2])}
""")

# KEYS: lease. ARGV: token. Returns 1 if somebody holds the lease; a value that is no lease counts
# as absent. If the key is absent, it is written only if it is present (XX): that changes nothing,
# but fails where Redis refuses writes.
_HELD = RedisScript("""
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
  redis.call('SET', KEYS[1], ARGV[1], 'XX', 'PX', 1)
  return 0
end
return left ~= -1 and type(redis.pcall('GET', KEYS[1])) == 'string' and 1 or 0
""")

# KEYS: lease. ARGV: ttl in ms. Returns 1 if the lease would have outlasted every renewal and was
# deleted.
_BREAK = RedisScript("""
if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[1]) then
  return redis.call('DEL', KEYS[1])
end
return 0
""")

# KEYS: lease. ARGV: token. Deletes the lease if it holds the token.
_RELEASE = RedisScript("""
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
""")


@dataclass(frozen=True, slots=True)
class LeaseView:
    """State of a lease at one moment."""

    holder: str
    """Token of the leader; empty if the lease is free."""
    left_s: float
    """Seconds until it ends unless it is renewed; 0 if it is free."""
    wanted_by: str
    """Token of a standby that wants to lead instead; empty if none asked recently."""


class Lease:
    """One candidate's view of the leader lease of a cluster, or of one of its groups.

    Attributes:
        token: The value of the lease while this candidate leads; unique for this process start.
        epoch: The epoch of the last successful `try_acquire`, 0 before. A loss does not clear it,
            so that a later acquisition is certain to exceed it.
        seen: The highest epoch Redis ever told this candidate, also while others led.
        is_forgotten: True if Redis, when last asked, knew no epoch as high as `seen`: it came back
            without its data, or a replica was promoted that lacked the last writes.
        left_s: Seconds that another's lease still had when last asked; 0 if nobody held it.
    """

    def __init__(
        self,
        redis: Redis,
        keys: RedisKeys,
        token: str,
        ttl_s: float,
        spoiled: Callable[[], object] = lambda: None,
    ) -> None:
        """Makes a candidate without asking Redis.

        `spoiled` is called when a damaged epoch had to be repaired.
        """
        self._redis = redis
        self._keys = keys
        self._ttl_ms = str(max(1, int(ttl_s * 1000)))
        self._stride = str(EPOCH_STRIDE if keys.groups > 1 else 1)
        self.token = token
        self.epoch = Epoch(0)
        self.seen = 0
        self.is_forgotten = False
        self.left_s = 0.0
        self._spoiled = spoiled

    async def try_acquire(self, beyond: int = 0, *, unless_forgotten: bool = False) -> bool:
        """Takes the lease if nobody holds it, with an epoch above `beyond` and every earlier one.

        `beyond` matters when Redis lost its last writes: an agent or this process may have seen a
        higher epoch than Redis remembers. `unless_forgotten` leaves the lease alone in that case:
        it is for the leader that has in memory what Redis forgot.
        """
        floor = str(max(beyond if is_epoch(beyond) else 0, self.epoch, self.seen))
        least = str(self.seen if unless_forgotten else 0)
        answer = await _ACQUIRE.run(
            self._redis,
            [
                self._keys.lease,
                self._keys.epoch,
                self._keys.clock,
                self._keys.quarantine,
                self._keys.events,
            ],
            [self.token, self._ttl_ms, floor, self._stride, str(self._keys.group), least],
        )
        epoch, found, left_ms, spoiled = cast(tuple[int, int, int, int], answer)
        if spoiled:
            self._spoiled()
        self.left_s = max(0, left_ms) / 1000
        self.is_forgotten = found < self.seen
        self.seen = max(self.seen, epoch, found)
        if epoch > 0:
            self.epoch = Epoch(epoch)
        return epoch > 0

    def follows(self, epoch: int) -> bool:
        """Returns True if the present epoch is the next one of this group after `epoch`."""
        return self.epoch == next_epoch(epoch, self._keys.group, self._keys.groups)

    async def look(self) -> LeaseView:
        """Returns who holds the lease, how long, and who wants it."""
        answer = await _LOOK.run(self._redis, [self._keys.lease, self._keys.wanted], [])
        holder, left_ms, wanted_by = cast(tuple[bytes | str, int, bytes | str], answer)
        return LeaseView(_text(holder), max(0, left_ms) / 1000, _text(wanted_by))

    async def is_held(self) -> bool:
        """Returns True if somebody holds the lease, False if it is free and could be taken.

        Raises:
            RedisError: Redis does not answer, or answers but refuses writes while the lease is
                free; OSError and TimeoutError mean that it does not answer.
        """
        return _integer(await _HELD.run(self._redis, [self._keys.lease], [self.token])) == 1

    async def want(self) -> None:
        """Announces, for as long as a lease lasts, that this candidate wants to lead instead."""
        await self._redis.set(self._keys.wanted, self.token, px=int(self._ttl_ms))
        pass_cancellation()

    async def renew(self) -> bool:
        """Prolongs the lease; False if it is no longer this candidate's with this epoch."""
        keys = self._keys
        answer = await _RENEW.run(
            self._redis,
            [keys.lease, keys.epoch, keys.quarantine, keys.events],
            [self.token, self._ttl_ms, str(self.epoch)],
        )
        if _integer(answer) == 2:
            self._spoiled()
        return _integer(answer) > 0

    async def break_stale(self) -> bool:
        """Ends another's lease that would last longer than any renewal could make it.

        The caller must have seen that nobody renews it. This happens when Redis' clock was set
        back: the lease of a leader that is gone would last until the clock is where it was.
        """
        answer = await _BREAK.run(self._redis, [self._keys.lease], [str(2 * int(self._ttl_ms))])
        return _integer(answer) == 1

    async def release(self) -> None:
        """Gives the lease back if it is still ours, so that a standby need not wait for its end."""
        await _RELEASE.run(self._redis, [self._keys.lease], [self.token])


def _integer(answer: object) -> int:
    return answer if isinstance(answer, int) else 0


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
