"""How much of a model's work may be unanswered at a time, learnt from how long answers take.

Little's law: what is unanswered, divided by what is answered per second, is how long an answer
takes. So with a limit on what is unanswered nobody waits for longer than that, whatever is offered,
and the device stays as busy as before as long as the limit keeps a queue in front of it. Where that
is follows from the share of their *slack* that requests spend waiting. Slack is the time a request
has beyond what it takes on an idle cluster.

Kin of the limits of TCP Vegas and of Netflix' concurrency-limits (Gradient). Different: the
yardstick is what the callers asked for, not a multiple of the shortest time seen, since a device
that works in batches needs a queue; and what was sent before the last change says nothing about it.
"""

from __future__ import annotations

import math

TARGET = 0.7
"""Share of its slack that all but the slowest tenth of the requests should spend waiting."""
HIGH = 0.85
"""From there on the limit is lowered; between the two it stays."""
BEGINS = 0.35
"""From there on there is a limit at all. Early: whatever is let in too much waits in vain."""
LOST = 1.5
"""Counted for a request that was refused or late for want of capacity."""
FLOOR = 1.0
_RARE = 0.01
"""So many may be lost."""
_FEWEST = 6
_MOST = 512
_SHORTEST_NS = 100_000_000
_LONGEST_NS = 5_000_000_000
_AGEING_PER_S = 0.001
"""The shortest time seen grows so fast, so that one of other days is forgotten."""
_TIGHT = 1.25
_TIGHTER_THAN_USUAL = 3.0
"""Who gives less than so many times the shortest time asks for the unlikely, and that teaches
nothing; the second number is for those who give less than half of what is usual for the model."""
_LOWEST_STEP = 0.6
_HIGHEST_STEP = 1.5
_PAUSE_NS = 500_000_000
_PAUSE_SHARE = 0.8
_MEMORY_NS = 20_000_000_000
_NEAR = 0.85
_CAREFUL_STEP = 1.01
"""Near where requests were lost in the last 20 s the limit grows no faster than this."""
_SMOOTHING = 0.1


class AdaptiveLimit:
    """The limit of one model at one gateway; infinite until waiting takes much of the slack.

    Sizes are rows of inferences, or generations without a first token.
    """

    def __init__(self, now_ns: int) -> None:
        self.value = math.inf
        self.usual_budget_ns = 0
        """What requests give that say nothing; 0 if unknown."""
        self.usual_ns = 0.0
        """What an answer takes, on average."""
        self._shortest_ns = math.inf
        self._aged_ns = now_ns
        self._changed_ns = now_ns
        self._opened_ns = now_ns
        self._first_fresh_ns = 0
        self._last_ns = now_ns
        """When somebody was answered last."""
        self._strains: list[float] = []
        self._lost = 0
        self._answered = 0.0
        """Sizes times how long they took: how much was unanswered on average, and not in vain."""
        self._peak = 0.0
        self._bound = False
        self._ceiling = math.inf
        """Where requests were lost a while ago."""
        self._ceiling_until_ns = 0

    def bounded(self, unanswered: float) -> None:
        """Notes that something was refused because so much was unanswered."""
        self._bound = True
        self._peak = max(self._peak, unanswered)

    def entered(self, unanswered: float) -> None:
        """Notes that so much is unanswered now."""
        self._peak = max(self._peak, unanswered)

    def interrupted(self, now_ns: int) -> None:
        """What came until now waited for something else than its turn; it teaches nothing."""
        self._changed_ns = self._opened_ns = now_ns
        self._begin_anew()

    def answered(self, began_ns: int, budget_ns: int, size: float, now_ns: int) -> None:
        """Takes an answer into account.

        Args:
            began_ns: When the request came.
            budget_ns: What it gave.
            size: How much of the limit it took.
            now_ns: The moment.
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
        """Takes a request into account that had no answer in time for want of capacity."""
        if self._stood_still(now_ns - began_ns, now_ns):
            self.interrupted(now_ns)
        elif self._teaches(budget_ns):
            self._lost += began_ns >= self._changed_ns
            self._learn(began_ns, LOST, now_ns)
        self._look(now_ns)

    def _stood_still(self, took_ns: int, now_ns: int) -> bool:
        """True if nobody was answered for nearly as long as this one waited.

        That is a pause and no queue, which moves meanwhile; who waited in it tells nothing of how
        much can be asked. Where there is a limit already, few are served at a time, and gaps are
        usual.
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
        # What came before the last change tells of the limit before it.
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
        # A small limit must grow, too, and one at its place must not swing.
        grown = self.value + max(self.value * (step - 1.0), min(1.0, 2.0 * (TARGET - strain)))
        near = _NEAR * self._ceiling
        if grown > near:
            grown = max(near, self.value * _CAREFUL_STEP)
        self.value = grown
