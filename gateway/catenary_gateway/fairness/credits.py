"""Who of those that want more than their share has had the least.

Every key has a counter of what it was served, divided by its share; who is behind goes first. That
is the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024),
with two differences: here nobody queues, so those count as waiting who were refused a moment ago;
and a key that was away is not lifted to the level of the others but to `allowance` below it, so
that one that asks for just its share keeps it in spite of the chance in when it asks.

Fair is weighted max-min: who asks for less than its share gets all of it, what it leaves goes to
the others by their shares.
"""

from __future__ import annotations

PATIENCE_NS = 2_000_000_000
"""Who was refused wants more for so long."""


class _Counter:
    __slots__ = ("refused_ns", "served", "share")

    def __init__(self, share: float, served: float) -> None:
        self.share = share
        self.served = served
        """Cost of what it was served since somebody was refused, divided by its share."""
        self.refused_ns: int | None = None
        """When it was refused last; None: not lately, it has what it wants."""


class FairCredits:
    """The counters of one model's keys."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self._wanting: dict[str, _Counter] = {}
        """Those that were refused lately, the latest at the end."""

    @property
    def wanting(self) -> int:
        """How many keys want more than they get."""
        return len(self._wanting)

    def is_behind(self, key: str, share: float, allowance: float, now_ns: int) -> bool:
        """True if a key has had no more than its share, beside those that want more.

        Args:
            key: Its name.
            share: Its share.
            allowance: Cost it may be ahead of or behind its share by chance.
            now_ns: The moment.
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
        """Notes what a key is served; a negative cost takes back what it was not."""
        if self._wanting:
            self._counter(key, share).served += cost / share

    def refused(self, key: str, share: float, now_ns: int) -> None:
        """Notes that a key wanted more."""
        counter = self._counter(key, share)
        counter.refused_ns = now_ns
        self._wanting.pop(key, None)
        self._wanting[key] = counter

    def _counter(self, key: str, share: float) -> _Counter:
        counter = self._counters.get(key)
        if counter is None:
            # Who comes anew has neither a claim on what it did not ask for nor a debt.
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
