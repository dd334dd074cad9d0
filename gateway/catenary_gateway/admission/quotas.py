"""The use that each API key has made of its rate limits.

A key's rate applies to the cluster: every gateway gives it an equal part of rate and burst, by the
number of gateways that the scheduler announces. A key whose connections all end at one of `n`
gateways therefore gets an `n`th of its rate there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from catenary_services.errors import QuotaExceeded
from catenary_services.security.key_limits import RateLimit
from catenary_services.security.keys import Principal
from catenary_services.security.token_bucket import TokenBucket

_MOST_NAMES = 20_000
_FAULT_BURST_S = 10.0
_FAULT_BYTES = 64 * 1024
"""Bytes read of a refused request for which its sender is charged like for one more request."""


FAULTS_PER_S = 100.0
"""Requests per second that may be refused as the fault of one key, or of one address without a
key."""


class TokenReservation:
    """A reservation of the most tokens that a generation may use, until their number is known."""

    __slots__ = ("_bucket", "_clock", "_tokens")

    def __init__(self, bucket: TokenBucket | None, tokens: int, clock: Callable[[], int]) -> None:
        self._bucket = bucket
        self._tokens = tokens
        self._clock = clock

    def settle(self, used: int) -> None:
        """Gives back the tokens that were not used; only the first call counts."""
        if self._bucket is not None:
            self._bucket.give_back(max(0, self._tokens - used), self._clock())
            self._bucket = None


class Quotas:
    """The token buckets of every key by name; overlapping keys of one name share them."""

    def __init__(
        self, clock: Callable[[], int] | None = None, faults_per_s: float = FAULTS_PER_S
    ) -> None:
        self._clock = clock or time.monotonic_ns
        self._fault_rate = RateLimit(faults_per_s, max(1.0, faults_per_s * _FAULT_BURST_S))
        self._faults: dict[str, TokenBucket] = {}
        self._gateways = 1
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    @property
    def gateways(self) -> int:
        """Number of gateways among which every rate is divided."""
        return self._gateways

    def divide(self, gateways: int) -> None:
        """Sets the number of gateways among which every rate is divided."""
        self._gateways = max(1, gateways)

    def enter(self, principal: Principal) -> None:
        """Counts one request of a key.

        Raises:
            QuotaExceeded: The key made as many requests as it may; says when to come back.
        """
        rate = principal.limits.requests
        if rate is None:
            return
        bucket = self._bucket(self._requests, principal.name, rate)
        wait_ns = bucket.take(1.0, self._clock())
        if wait_ns:
            raise _exceeded(principal, f"{rate.per_s:g} requests per second", wait_ns)

    def require_good(self, subject: str) -> None:
        """Checks that a key or address has not sent too many requests that were refused.

        Raises:
            QuotaExceeded: It has sent too many; the error says when to come back.
        """
        bucket = self._faults.get(subject)
        wait_ns = bucket.wait_ns(1.0, self._clock()) if bucket is not None else 0
        if wait_ns:
            raise QuotaExceeded(
                f"{subject} sent too many requests that had to be refused",
                retry_after_ns=wait_ns,
                details={"subject": subject},
            )

    def fault(self, subject: str, read_bytes: int) -> None:
        """Charges a key or address for a request that was its own fault."""
        bucket = self._faults.get(subject)
        if bucket is None:
            if len(self._faults) >= _MOST_NAMES:
                self._faults.pop(next(iter(self._faults)))
            bucket = self._faults[subject] = TokenBucket(self._fault_rate, self._clock())
        bucket.charge(1.0 + read_bytes / _FAULT_BYTES, self._clock())

    def reserve(self, principal: Principal, tokens: int) -> TokenReservation:
        """Reserves the tokens of a generation's prompt and of the longest answer it asks for.

        All are taken at the beginning, so that a key that starts many answers at once cannot use
        more than its rate allows; tokens that the answer does not need are given back at its end.
        A full bucket also admits a request that is larger than the bucket.

        Raises:
            QuotaExceeded: The bucket lacks the tokens; the error says when it has them.
        """
        rate = principal.limits.tokens
        if rate is None:
            return TokenReservation(None, tokens, self._clock)
        bucket = self._bucket(self._tokens, principal.name, rate)
        wait_ns = bucket.take(float(tokens), self._clock())
        if wait_ns:
            raise _exceeded(
                principal,
                f"{rate.per_s:g} tokens per second, and this request may use {tokens}",
                wait_ns,
            )
        return TokenReservation(bucket, tokens, self._clock)

    def forget_others(self, names: frozenset[str]) -> None:
        """Drops the buckets of keys that are not in `names`."""
        for buckets in (self._requests, self._tokens):
            for name in buckets.keys() - names:
                del buckets[name]

    def _bucket(self, buckets: dict[str, TokenBucket], name: str, rate: RateLimit) -> TokenBucket:
        parts = self._gateways
        mine = RateLimit(rate.per_s / parts, max(1.0, rate.burst / parts)) if parts > 1 else rate
        bucket = buckets.get(name)
        if bucket is None:
            if len(buckets) >= _MOST_NAMES:
                buckets.pop(next(iter(buckets)))
            bucket = buckets[name] = TokenBucket(mine, self._clock())
        else:
            bucket.reshape(mine, self._clock())
        return bucket


def _exceeded(principal: Principal, what: str, wait_ns: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"key {principal.name!r} has used up its quota of {what}",
        retry_after_ns=wait_ns,
        details={"subject": principal.name},
    )
