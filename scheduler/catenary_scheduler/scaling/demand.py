"""Demand for generated text, and detection of changes that call for new chains.

Demand is measured per model: sessions per second, and the mean lengths of their prompts and
answers. Chains are composed for these three numbers. They are trusted once enough sessions support
them; until then the lengths are drawn towards the usual ones. A change counts if it exceeds a
factor and lasts; it ends only below a lower factor (hysteresis), and compositions are some time
apart.

The last sessions that were answered are kept with their moments and lengths, too: chains are tuned
by replaying them, for the first time as soon as there are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from catenary_scheduler.planning.chains.replay import LEAST_SESSIONS, SessionLog
from catenary_scheduler.scaling.rates import ArrivalRates
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds

_KEPT_SESSIONS = 2_000
"""Number of sessions of a model that are kept: of more, a replay would take seconds."""
_KEPT_NS = 3600 * NANOSECONDS_PER_SECOND
"""Sessions that arrived longer ago say nothing about those to come."""
_KEPT_MODELS = 256


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Rate and mean lengths of one model's sessions, for which its chains are composed."""

    rate_per_s: float = 0.1
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    log: SessionLog | None = field(default=None, compare=False, repr=False)
    """The last sessions; None unless they are asked for and enough to be replayed."""

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

    Feed it `arrived`, `generated`, `finished` and `planned`; ask `decide` from time to time.
    """

    def __init__(self, policy: DemandPolicy | None = None) -> None:
        self._policy = policy or DemandPolicy()
        self._sessions = ArrivalRates(self._policy.time_constant_ns)
        self._prompts = ArrivalRates(self._policy.time_constant_ns)
        self._outputs = ArrivalRates(self._policy.time_constant_ns)
        self._answered: dict[ModelKey, deque[tuple[Nanoseconds, int, int]]] = {}
        """Arrival, prompt and answer of the last sessions, in the order of their ends."""
        self._replayed: set[ModelKey] = set()
        """The models whose sessions were replayed, or asked to be."""
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

    def finished(
        self, model: ModelKey, arrived_ns: Nanoseconds, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Keeps a session that was answered, with its lengths."""
        answered = self._answered.get(model)
        if answered is None:
            if len(self._answered) >= _KEPT_MODELS:
                del self._answered[next(iter(self._answered))]
            answered = self._answered[model] = deque(maxlen=_KEPT_SESSIONS)
        answered.append((arrived_ns, max(1, prompt_tokens), max(1, output_tokens)))

    def logged(self, model: ModelKey, now: Nanoseconds) -> SessionLog | None:
        """Returns the sessions of the last hour that were answered; None if they are too few."""
        kept = sorted(each for each in self._answered.get(model, ()) if each[0] > now - _KEPT_NS)
        if len(kept) < LEAST_SESSIONS:
            return None
        moments, prompts, outputs = zip(*kept, strict=True)
        return SessionLog(moments, prompts, outputs)

    def planned(self, loads: Mapping[ModelKey, SessionLoad], now: Nanoseconds) -> None:
        """Records that chains were composed for these loads."""
        self._replayed.update(model for model, load in loads.items() if load.log is not None)
        self._planned = {model: replace(load, log=None) for model, load in loads.items()}
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
        if now - self._planned_ns < policy.interval_ns:
            return ""
        if not lasting:
            return self._first_log()
        load = self.load(model, now)
        return (
            f"{model} is asked for {load.rate_per_s:.2g} sessions/s of {load.prompt_tokens:.0f} and"
            f" {load.output_tokens:.0f} tokens"
        )

    def _first_log(self) -> str:
        """Returns in words whose sessions can be replayed for the first time; empty if nobody's."""
        for model in self._planned.keys() - self._replayed:
            if len(self._answered.get(model, ())) >= LEAST_SESSIONS:
                self._replayed.add(model)  # asked for once, whatever comes of it
                return f"{model} has answered {LEAST_SESSIONS} sessions, which can be replayed"
        return ""
