"""Leader lease with a fencing epoch.

The lease alone is not safe: a leader may be paused past its expiry and then go on. So every leader
gets an epoch higher than any before it; Redis refuses batches (`store`) and agents refuse orders
of lower ones.
"""

from __future__ import annotations

from redis.asyncio import Redis

from scheduler.state.keys import Keys
from scheduler.state.script import Script
from services.domain.ids import Epoch

# KEYS: lease, epoch. ARGV: token, ttl in ms, the least epoch to go beyond.
# Returns the new epoch, or 0 if somebody holds the lease.
_ACQUIRE = Script("""
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return 0
end
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[3]) > known then
  redis.call('SET', KEYS[2], ARGV[3])
end
return redis.call('INCR', KEYS[2])
""")

# KEYS: lease, epoch. ARGV: token, ttl in ms, own epoch. Returns 1 if still ours and renewed.
_RENEW = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
""")

# KEYS: lease. ARGV: token.
_RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
""")


class Lease:
    """One candidate's view of the leader lease.

    Attributes:
        token: What the lease holds while this candidate leads; unique for this process start.
        epoch: The epoch of the last successful `try_acquire`, 0 before. Not cleared by a loss, so
            that a later acquisition is certain to go beyond it.
    """

    def __init__(self, redis: Redis, keys: Keys, token: str, ttl_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._ttl_ms = str(max(1, int(ttl_s * 1000)))
        self.token = token
        self.epoch = Epoch(0)

    async def try_acquire(self, beyond: int = 0) -> bool:
        """Takes the lease if nobody holds it, with an epoch above `beyond` and every earlier one.

        `beyond` matters when Redis lost its last writes: an agent or this process may have seen a
        higher epoch than Redis remembers.
        """
        floor = str(max(beyond, self.epoch))
        answer = await _ACQUIRE.run(
            self._redis,
            [self._keys.lease, self._keys.epoch],
            [self.token, self._ttl_ms, floor],
        )
        epoch = _integer(answer)
        if epoch:
            self.epoch = Epoch(epoch)
        return epoch > 0

    async def renew(self) -> bool:
        """Prolongs the lease; False if it is no longer this candidate's with this epoch."""
        answer = await _RENEW.run(
            self._redis,
            [self._keys.lease, self._keys.epoch],
            [self.token, self._ttl_ms, str(self.epoch)],
        )
        return _integer(answer) == 1

    async def release(self) -> None:
        """Gives the lease back, if it is still ours, so that a standby need not wait for it."""
        await _RELEASE.run(self._redis, [self._keys.lease], [self.token])


def _integer(answer: object) -> int:
    return answer if isinstance(answer, int) else 0
