"""The admission of requests by model, which admits or refuses each at once.

`FairLimiter` is the admission of one model, and pure: time is an argument. `FairLimiters` has those
of all models, the clock, and the errors of requests that they refuse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from catenary_gateway.catalog import Model
from catenary_gateway.fairness.limit import AdaptiveLimit
from catenary_services.errors import DeadlineExceeded, Overloaded, SloUnattainable
from catenary_services.security.keys import Principal

OPEN_SHARE = 0.8
"""Share of the limit that is open to every key; the rest is for keys that are behind."""
PATIENCE_NS = 2_000_000_000
"""Nanoseconds after a refusal for which a key counts as wanting more."""
_SHORTEST_RETRY_NS = 100_000_000
_LONGEST_RETRY_NS = 5_000_000_000
_SMOOTHING = 0.05
_MOST_LIMITERS = 4096


class FairRequest(msgspec.Struct, frozen=True):
    """A request for admission: its key, and its cost to the limit and to the key's share."""

    key: str
    share: float
    priority: int
    """Priority of the request; higher is more urgent."""
    size: float = 1.0
    """Part of the limit that it takes: its rows, or 1 for a generation."""
    cost: float = 1.0
    """Cost to the key's share: rows, or tokens."""
    budget_ns: int = 0
    """Nanoseconds that may pass until `FairLimiter.answered` is called for it."""


class LimiterEntry:
    """A request that was let in; it is inside until its answer, its first token, or its failure."""

    __slots__ = ("began_ns", "inside", "request")

    def __init__(self, request: FairRequest, began_ns: int) -> None:
        self.request = request
        self.began_ns = began_ns
        self.inside = True


class FairLimiter:
    """The admission limiter of one model.

    Invariant: `unanswered` is the sum of the sizes of all entries that are inside.
    """

    def __init__(self, now_ns: int) -> None:
        self.limit = AdaptiveLimit(now_ns)
        self.credits = FairCredits()
        self.unanswered = 0.0
        self._by_priority: dict[int, float] = {}
        self._usual_cost = 0.0
        self._refused_share = 0.0

    def would_admit(self, request: FairRequest, now_ns: int) -> bool:
        """Returns True if a request would be let in now; changes nothing but notes a refusal."""
        limit = self.limit.value
        if math.isinf(limit):
            return True
        # Less urgent requests do not count, because the scheduler serves more urgent ones first.
        ahead = self._ahead(request.priority)
        allowance = max(1.0, limit) * (self._usual_cost or request.cost)
        behind = self.credits.is_behind(request.key, request.share, allowance, now_ns)
        # A large request gets in once half of the limit is free, or small ones would starve it.
        size = min(request.size, limit / 2)
        if not ahead or ahead + size <= limit * (1.0 if behind else OPEN_SHARE):
            return True
        self.credits.refused(request.key, request.share, now_ns)
        self.limit.bounded(self.unanswered)
        self._refused_share += _SMOOTHING * (1.0 - self._refused_share)
        return False

    def admit(self, request: FairRequest, now_ns: int) -> LimiterEntry | None:
        """Lets a request in, or returns None to refuse it."""
        if not self.would_admit(request, now_ns):
            return None
        self.unanswered += request.size
        self._by_priority[request.priority] = (
            self._by_priority.get(request.priority, 0.0) + request.size
        )
        self.limit.entered(self.unanswered)
        self.credits.charge(request.key, request.share, request.cost)
        self._usual_cost += _SMOOTHING * (request.cost - self._usual_cost)
        self._refused_share -= _SMOOTHING * self._refused_share
        return LimiterEntry(request, now_ns)

    def answered(self, entry: LimiterEntry, now_ns: int) -> None:
        """Notes that an entry has its answer, or its first token."""
        if self._leave(entry):
            self.limit.answered(entry.began_ns, entry.request.budget_ns, entry.request.size, now_ns)

    def lost(self, entry: LimiterEntry, now_ns: int) -> None:
        """Notes that an entry was refused later, or late, because capacity was short."""
        if self._leave(entry):
            self.limit.lost(entry.began_ns, entry.request.budget_ns, now_ns)

    def left(self, entry: LimiterEntry) -> None:
        """Notes that an entry ended for reasons that say nothing about capacity."""
        self._leave(entry)

    def correct(self, entry: LimiterEntry, cost: float) -> None:
        """Corrects an entry's cost to its key to what it really was."""
        self.credits.charge(entry.request.key, entry.request.share, cost - entry.request.cost)

    def retry_after_ns(self) -> int:
        """Returns after how many nanoseconds to try again: the more are refused, the later."""
        expected = self.limit.usual_ns / max(0.02, 1.0 - self._refused_share)
        return int(min(max(expected, _SHORTEST_RETRY_NS), _LONGEST_RETRY_NS))

    def _ahead(self, priority: int) -> float:
        if len(self._by_priority) <= 1 and priority in self._by_priority:
            return self.unanswered
        return sum(size for level, size in self._by_priority.items() if level >= priority)

    def _leave(self, entry: LimiterEntry) -> bool:
        if not entry.inside:
            return False
        entry.inside = False
        request = entry.request
        self.unanswered -= request.size
        left = self._by_priority[request.priority] - request.size
        if left > 1e-9:
            self._by_priority[request.priority] = left
        else:
            del self._by_priority[request.priority]
            if not self._by_priority:
                self.unanswered = 0.0
        return True


class _Counter:
    __slots__ = ("refused_ns", "served", "share")

    def __init__(self, share: float, served: float) -> None:
        self.share = share
        self.served = served
        """Cost of what the key was served since some key was refused, divided by its share."""
        self.refused_ns: int | None = None
        """Time of its last refusal; None if that is long ago: then the key has what it wants."""


class FairCredits:
    """The counters of one model's keys: the key that has had the least for its share goes first.

    Every key has a counter of what it was served, divided by its share; the key with the lowest
    counter goes first. That is the virtual token counter (Sheng et al., "Fairness in Serving Large
    Language Models", OSDI 2024), with two differences. Nobody queues here, so keys count as waiting
    that were refused a moment ago. And a key that was away is not lifted to the level of the others
    but to `allowance` below it, so that a key that asks for just its share gets it although it asks
    at random.

    The aim is weighted max-min fairness: a key that asks for less than its share gets all it asks
    for, and the rest goes to the others by their shares.
    """

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self._wanting: dict[str, _Counter] = {}
        """The keys that were refused less than `PATIENCE_NS` ago, the latest at the end."""

    @property
    def wanting(self) -> int:
        """Number of keys that want more than they get."""
        return len(self._wanting)

    def is_behind(self, key: str, share: float, allowance: float, now_ns: int) -> bool:
        """Returns True if a key has had no more than its share, among those that want more.

        Args:
            key: Name of the key.
            share: The key's share, relative to the shares of others.
            allowance: Cost by which the key may be ahead of or behind its share by chance.
            now_ns: The present time on the monotonic clock.
        """
        self._forget(now_ns)
        if not self._wanting:
            return True
        counter = self._counter(key, share)
        weight = served = 0.0
        for name, other in self._wanting.items():
            if name != key:
                weight += other.share
                served += other.share * other.served
        if not weight:
            return True
        level = served / weight
        if counter.refused_ns is None:
            counter.served = max(counter.served, level - allowance / share)
        mean = (served + share * counter.served) / (weight + share)
        return counter.served <= mean + 1e-9 * (1.0 + abs(mean))

    def charge(self, key: str, share: float, cost: float) -> None:
        """Adds the cost of what a key is served; a negative cost takes back what it was not."""
        if self._wanting:
            self._counter(key, share).served += cost / share

    def refused(self, key: str, share: float, now_ns: int) -> None:
        """Notes that a key was refused, and so wants more than it gets."""
        counter = self._counter(key, share)
        counter.refused_ns = now_ns
        self._wanting.pop(key, None)
        self._wanting[key] = counter

    def _counter(self, key: str, share: float) -> _Counter:
        counter = self._counters.get(key)
        if counter is None:
            # A new key has neither a debt nor a claim to what it did not ask for before.
            weight = sum(other.share for other in self._wanting.values())
            served = sum(other.share * other.served for other in self._wanting.values())
            counter = _Counter(share, served / weight if weight else 0.0)
            self._counters[key] = counter
        counter.share = share
        return counter

    def _forget(self, now_ns: int) -> None:
        while self._wanting:
            name, oldest = next(iter(self._wanting.items()))
            assert oldest.refused_ns is not None
            if now_ns - oldest.refused_ns <= PATIENCE_NS:
                return
            oldest.refused_ns = None
            del self._wanting[name]
        self._counters.clear()


class FairPermit:
    """A request that was let in, from its admission to its end."""

    __slots__ = ("_clock", "_entry", "_limiter")

    def __init__(self, limiter: FairLimiter, entry: LimiterEntry, clock: Callable[[], int]) -> None:
        self._limiter = limiter
        self._entry = entry
        self._clock = clock

    def answered(self) -> None:
        """Notes that the request has its answer, or its first token."""
        self._limiter.answered(self._entry, self._clock())

    def failed(self, error: BaseException, cost: float = 0.0) -> None:
        """Notes, once, that the request ended with an error; `cost` is what it cost its key."""
        if _for_want_of_capacity(error):
            self._limiter.lost(self._entry, self._clock())
        else:
            self._limiter.left(self._entry)
        self.cost(cost)

    def cost(self, cost: float) -> None:
        """Notes, once at the end, what the request cost its key."""
        self._limiter.correct(self._entry, cost)


class FairLimiters:
    """The limiters by model, each made at the first request for its model."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], int] | None = None) -> None:
        self._enabled = enabled
        self._clock = clock or time.monotonic_ns
        self._limiters: dict[str, FairLimiter] = {}

    def precheck(self, model: Model, principal: Principal) -> None:
        """Checks that a small request at the key's highest priority might be let in now.

        An endpoint need not read the body of a request that would be refused.

        Raises:
            Overloaded: It would be refused.
        """
        limiter = self._limiters.get(model.label)
        if limiter is None or not self._enabled or limiter.limit.value == math.inf:
            return
        limits = principal.limits
        request = FairRequest(principal.name, limits.share, limits.max_priority)
        if not limiter.would_admit(request, self._clock()):
            raise _refusal(model, limiter)

    def admit(self, model: Model, request: FairRequest) -> FairPermit:
        """Lets a request in, and returns its permit.

        Raises:
            Overloaded: The model cannot answer more in time; the error says when to come back.
        """
        now_ns = self._clock()
        limiter = self._limiters.get(model.label)
        if limiter is None:
            if len(self._limiters) >= _MOST_LIMITERS:
                # Versions of models come and go; a limiter without requests can be made again.
                self._limiters = {
                    name: limiter for name, limiter in self._limiters.items() if limiter.unanswered
                }
            limiter = self._limiters[model.label] = FairLimiter(now_ns)
        limiter.limit.usual_budget_ns = 0 if model.generates else model.default_slo_ns
        if not self._enabled:
            limiter.limit.value = float("inf")
        entry = limiter.admit(request, now_ns)
        if entry is None:
            raise _refusal(model, limiter)
        return FairPermit(limiter, entry, self._clock)

    def interrupted(self) -> None:
        """Notes that no scheduler led for a while: waiting times until now teach nothing."""
        now_ns = self._clock()
        for limiter in self._limiters.values():
            limiter.limit.interrupted(now_ns)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Returns by model the limit (infinite while there is none) and the unanswered amount."""
        return {
            name: (limiter.limit.value, limiter.unanswered)
            for name, limiter in self._limiters.items()
        }


def _refusal(model: Model, limiter: FairLimiter) -> Overloaded:
    return Overloaded(
        f"more is asked of model {model.label} than it can answer in time",
        retry_after_ns=limiter.retry_after_ns(),
    )


def _for_want_of_capacity(error: BaseException) -> bool:
    if isinstance(error, SloUnattainable):
        # Without advice when to retry, the objective cannot be met at any load.
        return error.retry_after_ns is not None
    return isinstance(error, Overloaded | DeadlineExceeded)
