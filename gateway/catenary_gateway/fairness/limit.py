"""A limit on a model's unanswered work, learnt from how long its answers take.

Little's law: what is unanswered, divided by what is answered per second, is how long an answer
takes. So with a limit on what is unanswered nobody waits for longer than that, whatever is offered,
and the device stays as busy as before as long as the limit keeps a queue in front of it. Where that
is follows from the share of their *slack* that requests spend waiting. Slack is the time a request
has beyond what it takes on an idle cluster.

The limits of TCP Vegas and of Netflix' concurrency-limits (Gradient) are related. Here the
yardstick is the time that callers give, not a multiple of the shortest time seen, since a device
that works in batches needs a queue; and requests sent before the last change of the limit say
nothing about it.
"""

from __future__ import annotations

import math

TARGET = 0.7
"""Share of its slack that a request should spend waiting at most, the slowest tenth excepted."""
HIGH = 0.85
"""Share of the slack above which the limit is lowered; between `TARGET` and this it stays."""
BEGINS = 0.35
"""Share of the slack above which there is a limit at all. It is low, because whatever is let in
beyond the limit waits in vain."""
LOST = 1.5
"""Share of the slack counted for a request that was refused or late because capacity was short."""
FLOOR = 1.0
_RARE = 0.01
"""Share of the requests that may be lost without lowering the limit."""
_FEWEST = 6
_MOST = 512
_SHORTEST_NS = 100_000_000
_LONGEST_NS = 5_000_000_000
_AGEING_PER_S = 0.001
"""Growth of the shortest time seen per second, so that an old one is forgotten in time."""
_TIGHT = 1.25
_TIGHTER_THAN_USUAL = 3.0
"""Budgets below `_TIGHT` times the shortest time ask for the unlikely and teach nothing. For a
budget below half of the model's usual one the factor is `_TIGHTER_THAN_USUAL`."""
_LOWEST_STEP = 0.6
_HIGHEST_STEP = 1.5
_PAUSE_NS = 500_000_000
_PAUSE_SHARE = 0.8
_MEMORY_NS = 20_000_000_000
_NEAR = 0.85
_CAREFUL_STEP = 1.01
"""Largest growth of the limit near the value at which requests were lost in the last 20 s."""
_SMOOTHING = 0.1


class AdaptiveLimit:
    """The limit of one model at one gateway, infinite until waiting takes much of the slack.

    Sizes count rows of inferences, or generations without a first token.
    """

    def __init__(self, now_ns: int) -> None:
        self.value = math.inf
        self.usual_budget_ns = 0
        """Budget in nanoseconds of requests that name none; 0 if unknown."""
        self.usual_ns = 0.0
        """Moving average of the time to an answer, in nanoseconds; 0 before the first one."""
        self._shortest_ns = math.inf
        self._aged_ns = now_ns
        self._changed_ns = now_ns
        self._opened_ns = now_ns
        self._first_fresh_ns = 0
        self._last_ns = now_ns
        """Time at which the last request was answered."""
        self._strains: list[float] = []
        self._lost = 0
        self._answered = 0.0
        """Sum of sizes times durations of the answered requests. Divided by the elapsed time it is
        the mean amount unanswered, without requests that waited in vain."""
        self._peak = 0.0
        self._bound = False
        self._ceiling = math.inf
        """The limit at which requests were lost lately; infinite if none were."""
        self._ceiling_until_ns = 0

    def bounded(self, unanswered: float) -> None:
        """Notes that a request was refused because of the limit."""
        self._bound = True
        self._peak = max(self._peak, unanswered)

    def entered(self, unanswered: float) -> None:
        """Notes the amount that is unanswered after a request was let in."""
        self._peak = max(self._peak, unanswered)

    def interrupted(self, now_ns: int) -> None:
        """Drops what was learnt until now: requests waited for something other than their turn."""
        self._changed_ns = self._opened_ns = now_ns
        self._begin_anew()

    def answered(self, began_ns: int, budget_ns: int, size: float, now_ns: int) -> None:
        """Learns from the time to one answer.

        Args:
            began_ns: Time at which the request was let in.
            budget_ns: Nanoseconds that its caller gave for the answer.
            size: The part of the limit that it took.
            now_ns: The present time on the monotonic clock.
        """
        took_ns = max(1, now_ns - began_ns)
        if self._stood_still(took_ns, now_ns):
            self.interrupted(now_ns)
        self._last_ns = now_ns
        self.usual_ns += _SMOOTHING * (took_ns - self.usual_ns) if self.usual_ns else took_ns
        self._answered += size * took_ns
        aged = 1.0 + _AGEING_PER_S * (now_ns - self._aged_ns) / 1e9
        self._shortest_ns, self._aged_ns = min(self._shortest_ns * aged, took_ns), now_ns
        if self._teaches(budget_ns):
            slack_ns = budget_ns - self._shortest_ns
            self._learn(began_ns, (took_ns - self._shortest_ns) / slack_ns, now_ns)
        self._look(now_ns)

    def lost(self, began_ns: int, budget_ns: int, now_ns: int) -> None:
        """Learns from a request that had no answer in time because capacity was short."""
        if self._stood_still(now_ns - began_ns, now_ns):
            self.interrupted(now_ns)
        elif self._teaches(budget_ns):
            self._lost += began_ns >= self._changed_ns
            self._learn(began_ns, LOST, now_ns)
        self._look(now_ns)

    def _stood_still(self, took_ns: int, now_ns: int) -> bool:
        """Returns True if no request was answered for nearly as long as this one took.

        That is a pause and not a queue, which would move meanwhile; requests that waited in it say
        nothing about capacity. Once there is a limit, few requests are served at a time and gaps
        are usual, so none counts as a pause.
        """
        if not math.isinf(self.value):
            return False
        gap_ns = now_ns - self._last_ns
        return gap_ns >= _PAUSE_NS and gap_ns >= _PAUSE_SHARE * took_ns

    def _teaches(self, budget_ns: int) -> bool:
        if math.isinf(self._shortest_ns):
            return 2 * budget_ns >= self.usual_budget_ns
        if 2 * budget_ns < self.usual_budget_ns:
            return budget_ns >= _TIGHTER_THAN_USUAL * self._shortest_ns
        return budget_ns >= _TIGHT * self._shortest_ns

    def _learn(self, began_ns: int, strain: float, now_ns: int) -> None:
        # A request that came before the last change tells of the limit before it.
        if began_ns < self._changed_ns or len(self._strains) >= _MOST:
            return
        if not self._strains:
            self._first_fresh_ns = now_ns
        self._strains.append(strain)

    def _look(self, now_ns: int) -> None:
        since_ns = now_ns - self._first_fresh_ns
        if len(self._strains) < _FEWEST:
            if not self._strains or since_ns < _LONGEST_NS:
                return
        elif since_ns < min(max(_SHORTEST_NS, self.usual_ns / 2), _LONGEST_NS):
            return
        self._strains.sort()
        strain = self._strains[math.ceil(0.9 * len(self._strains)) - 1]
        if self._lost > _RARE * len(self._strains):
            strain = max(strain, 1.0)
        before = self.value
        self._change(strain, now_ns)
        if self.value != before:
            self._changed_ns = now_ns
        self._opened_ns = now_ns
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._strains.clear()
        self._lost = 0
        self._answered = self._peak = 0.0
        self._bound = False

    def _change(self, strain: float, now_ns: int) -> None:
        if math.isinf(self.value):
            if strain > BEGINS:
                held = self._answered / max(1, now_ns - self._opened_ns)
                self.value = max(FLOOR, held * TARGET / strain if held else self._peak / 2)
        elif strain > HIGH:
            if strain >= 1.0:
                self._ceiling, self._ceiling_until_ns = self.value, now_ns + _MEMORY_NS
            step = max(_LOWEST_STEP, math.sqrt(TARGET / strain))
            self.value = max(FLOOR, min(self.value, max(self._peak, FLOOR)) * step)
        elif self._bound and strain < TARGET:
            self._grow(strain, now_ns)

    def _grow(self, strain: float, now_ns: int) -> None:
        if now_ns > self._ceiling_until_ns:
            self._ceiling = math.inf
        step = min(_HIGHEST_STEP, math.sqrt(TARGET / max(strain, 1e-3)))
        # The added term lets a small limit grow, but a limit near its target must not swing.
        grown = self.value + max(self.value * (step - 1.0), min(1.0, 2.0 * (TARGET - strain)))
        near = _NEAR * self._ceiling
        if grown > near:
            grown = max(near, self.value * _CAREFUL_STEP)
        self.value = grown
