"""The last hour of one gateway: outcomes, latencies and tokens of each model, in steps of seconds.

`RecentOutcomes` tells of minutes, with every reason. This one reaches further back and keeps of a
step that is over six numbers, so that its size is bounded by the hour and the number of models,
however many requests there are. Nothing has to be sampled: a step ends when the next one is counted
or somebody looks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from catenary_gateway.observability.outcome_kinds import OutcomeKind
from catenary_gateway.observability.outcomes import bin_of, percentile_ns

STEP_S = 10
STEPS = 360
"""Number of steps that are kept; together they span an hour."""
MOST_MODELS = 64
"""Number of models whose hour is kept. Beyond, the model that was quiet for longest is forgotten,
which a gateway gets to only by serving ever new versions."""
_STEP_NS = STEP_S * 1_000_000_000


class HistoryStep(NamedTuple):
    """The record of one model's requests within one step that is over."""

    number: int
    """The step's number: its start on the monotonic clock, in units of `STEP_S`."""
    good: int
    """Number of requests that were answered in time."""
    late: int
    """Number of requests that were accepted and not answered in time."""
    refused: int
    """Number of requests that were turned away."""
    tokens: int
    """Number of tokens that arrived here from agents, of all generations."""
    p99_ns: int
    """99th percentile of the time from arrival to answer, within 5 % of the true value; 0 if none
    was answered."""


@dataclass(slots=True)
class _OpenStep:
    number: int
    kinds: Counter[OutcomeKind] = field(default_factory=Counter)
    bins: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    def closed(self) -> HistoryStep:
        kinds = self.kinds
        return HistoryStep(
            self.number,
            kinds[OutcomeKind.GOOD],
            kinds[OutcomeKind.LATE],
            kinds[OutcomeKind.REFUSED],
            self.tokens,
            percentile_ns(self.bins, 0.99),
        )


class _ModelHistory:
    """The steps of one model in which anything happened."""

    def __init__(self) -> None:
        self.open = _OpenStep(-1)
        self._closed: deque[HistoryStep] = deque(maxlen=STEPS)

    def at(self, number: int) -> _OpenStep:
        """Returns the open step, after closing one that is over."""
        if self.open.number < number:
            if self.open.number >= 0:
                self._closed.append(self.open.closed())
            self.open = _OpenStep(number)
        return self.open

    def since(self, oldest: int, present: int) -> list[HistoryStep]:
        """Returns the steps from `oldest` on that are over, `present` being the one that is not."""
        steps = [step for step in self._closed if step.number >= oldest]
        if oldest <= self.open.number < present:
            steps.append(self.open.closed())
        return steps


class RequestHistory:
    """The last hour of every model, of bounded size.

    Requests that were turned away before their model was known are those of the model "".
    """

    def __init__(self, began_ns: int) -> None:
        """Begins at `began_ns` on the monotonic clock, before which nothing is known."""
        self._began_ns = began_ns
        self._models: dict[str, _ModelHistory] = {}

    def add(self, model: str, now_ns: int, kind: OutcomeKind, duration_ns: int = 0) -> None:
        """Counts a request that has ended.

        Args:
            model: The model's label.
            now_ns: The present time on the monotonic clock.
            kind: The kind of the request; clients' own mistakes are not counted.
            duration_ns: Time from arrival to answer; 0 if it ended with an error.
        """
        if kind is OutcomeKind.CLIENT:
            return
        step = self._step(model, now_ns)
        step.kinds[kind] += 1
        if duration_ns:
            step.bins[bin_of(duration_ns)] += 1

    def add_token(self, model: str, now_ns: int) -> None:
        """Counts a token of a generation."""
        self._step(model, now_ns).tokens += 1

    def covered_s(self, now_ns: int) -> int:
        """Returns the number of seconds that are known, at most an hour."""
        return min(STEPS * STEP_S, max(0, now_ns - self._began_ns) // 1_000_000_000)

    def models(self) -> tuple[str, ...]:
        """Returns the labels of all models that are remembered."""
        return tuple(self._models)

    def of(self, model: str, now_ns: int) -> list[HistoryStep]:
        """Returns one model's steps of the last hour in which anything happened, oldest first.

        The present step is left out: of its ten seconds some are still to come.
        """
        found, present = self._models.get(model), now_ns // _STEP_NS
        return found.since(present - STEPS, present) if found is not None else []

    def _step(self, model: str, now_ns: int) -> _OpenStep:
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= MOST_MODELS:
                quiet = min(self._models, key=lambda each: self._models[each].open.number)
                del self._models[quiet]
            found = self._models[model] = _ModelHistory()
        return found.at(now_ns // _STEP_NS)
