"""Fairness among the API keys of a model: the key that has had the least for its share goes first.

Every key has a counter of what it was served, divided by its share; the key with the lowest counter
goes first. That is the virtual token counter (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024), with two differences. Nobody queues here, so keys count as waiting that were
refused a moment ago. And a key that was away is not lifted to the level of the others but to
`allowance` below it, so that a key that asks for just its share gets it although it asks at random.

The aim is weighted max-min fairness: a key that asks for less than its share gets all it asks for,
and the rest goes to the others by their shares.
"""

from __future__ import annotations

PATIENCE_NS = 2_000_000_000
"""Nanoseconds after a refusal for which a key counts as wanting more."""


class _Counter:
    __slots__ = ("refused_ns", "served", "share")

    def __init__(self, share: float, served: float) -> None:
        self.share = share
        self.served = served
        """Cost of what the key was served since some key was refused, divided by its share."""
        self.refused_ns: int | None = None
        """Time of its last refusal; None if that is long ago: then the key has what it wants."""


class FairCredits:
    """The counters of one model's keys."""

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
