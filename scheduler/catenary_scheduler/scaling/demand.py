"""Demand for generated text, and detection of changes that call for new chains.

Demand is measured per model: sessions per second, and the mean lengths of their prompts and
answers. Chains are composed for these three numbers. They are trusted once enough sessions support
them; until then the lengths are drawn towards the usual ones. A change counts if it exceeds a
factor and lasts; it ends only below a lower factor (hysteresis), and compositions are some time
apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.scaling.rates import ArrivalRates
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Rate and mean lengths of one model's sessions, for which its chains are composed."""

    rate_per_s: float = 0.1
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0

    def factor(self, other: SessionLoad) -> float:
        """Returns the largest ratio, at least 1, between these three numbers and another's."""
        pairs = (
            (self.rate_per_s, other.rate_per_s),
            (self.prompt_tokens, other.prompt_tokens),
            (self.output_tokens, other.output_tokens),
        )
        return max(max(one, two) / min(one, two) for one, two in pairs)


@dataclass(frozen=True, slots=True)
class DemandPolicy:
    """Thresholds above which demand alone is a reason to compose chains anew."""

    usual: SessionLoad = SessionLoad()
    """Load that is expected before any session was seen. Its rate is also the lowest that chains
    are composed for."""
    factor: float = 2.0
    """A load counts as changed if its rate or a mean length differs from the planned one by this
    factor."""
    let_go: float = 1.5
    """A change ends when the factor falls below this."""
    lasting_ns: Nanoseconds = 10 * NANOSECONDS_PER_SECOND
    interval_ns: Nanoseconds = 60 * NANOSECONDS_PER_SECOND
    """Least time between two compositions, in nanoseconds."""
    time_constant_ns: Nanoseconds = 120 * NANOSECONDS_PER_SECOND
    least_sessions: float = 20.0
    """The least number of sessions within the time constant: with fewer, the rate stays as planned.
    The usual lengths weigh as much as this many sessions."""


class SessionDemand:
    """A follower of demand that says when to compose chains anew.

    Feed it `arrived`, `generated` and `planned`; ask `decide` from time to time.
    """

    def __init__(self, policy: DemandPolicy | None = None) -> None:
        self._policy = policy or DemandPolicy()
        self._sessions = ArrivalRates(self._policy.time_constant_ns)
        self._prompts = ArrivalRates(self._policy.time_constant_ns)
        self._outputs = ArrivalRates(self._policy.time_constant_ns)
        self._planned: dict[ModelKey, SessionLoad] = {}
        self._planned_ns: Nanoseconds | None = None
        self._moved_ns: Nanoseconds | None = None
        """Moment since which the factor has been too large; None while it is not."""

    def arrived(self, model: ModelKey, prompt_tokens: int, now: Nanoseconds) -> None:
        """Counts a session that was asked for, and the length of its prompt."""
        self._sessions.arrived(model, 1, now)
        self._prompts.arrived(model, prompt_tokens, now)

    def generated(self, model: ModelKey, tokens: int, now: Nanoseconds) -> None:
        """Counts tokens that were generated since the last call."""
        self._outputs.arrived(model, tokens, now)

    def planned(self, loads: Mapping[ModelKey, SessionLoad], now: Nanoseconds) -> None:
        """Records that chains were composed for these loads."""
        self._planned = dict(loads)
        self._planned_ns = now
        self._moved_ns = None

    def planned_rate(self, model: ModelKey) -> float:
        """Returns the sessions per second of a model for which its chains were last composed."""
        return self._planned.get(model, self._policy.usual).rate_per_s

    def load(self, model: ModelKey, now: Nanoseconds) -> SessionLoad:
        """Returns the load of a model for which its chains should be composed now."""
        policy, usual = self._policy, self._policy.usual
        seen = self._sessions.observed_rows(model, now)
        rate = self._planned.get(model, usual).rate_per_s
        if seen >= policy.least_sessions:
            rate = max(usual.rate_per_s, self._sessions.rate(model, now))

        def mean(rates: ArrivalRates, expected: float) -> float:
            total = rates.observed_rows(model, now) + policy.least_sessions * expected
            return max(1.0, total / (seen + policy.least_sessions))

        return SessionLoad(
            rate,
            mean(self._prompts, usual.prompt_tokens),
            mean(self._outputs, usual.output_tokens),
        )

    def decide(self, now: Nanoseconds) -> str:
        """Returns in words why chains should be composed anew; empty if they should not."""
        if self._planned_ns is None or not self._planned:
            return ""
        policy = self._policy
        factors = {
            model: self.load(model, now).factor(planned) for model, planned in self._planned.items()
        }
        model = max(factors, key=lambda each: factors[each])
        if factors[model] < policy.let_go:
            self._moved_ns = None
        elif factors[model] >= policy.factor and self._moved_ns is None:
            self._moved_ns = now
        lasting = self._moved_ns is not None and now - self._moved_ns >= policy.lasting_ns
        if not lasting or now - self._planned_ns < policy.interval_ns:
            return ""
        load = self.load(model, now)
        return (
            f"{model} is asked for {load.rate_per_s:.2g} sessions/s of {load.prompt_tokens:.0f} and"
            f" {load.output_tokens:.0f} tokens"
        )
