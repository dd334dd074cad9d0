"""The gates of all models: from a request to "come in" or to the error its caller gets."""

from __future__ import annotations

import time
from collections.abc import Callable

from catenary_gateway.catalog import Model
from catenary_gateway.fairness.fair_limiter import FairLimiter, FairRequest, LimiterEntry
from catenary_services.errors import DeadlineExceeded, Overloaded, SloUnattainable
from catenary_services.security.keys import Principal

_MOST_GATES = 4096


class FairPermit:
    """A request that was let in, until its end."""

    __slots__ = ("_clock", "_entry", "_gate")

    def __init__(self, gate: FairLimiter, entry: LimiterEntry, clock: Callable[[], int]) -> None:
        self._gate = gate
        self._entry = entry
        self._clock = clock

    def answered(self) -> None:
        """It has its answer, or its first token."""
        self._gate.answered(self._entry, self._clock())

    def failed(self, error: BaseException, cost: float = 0.0) -> None:
        """It ended with an error, and cost its key so much all the same; once."""
        if _for_want_of_capacity(error):
            self._gate.lost(self._entry, self._clock())
        else:
            self._gate.left(self._entry)
        self.cost(cost)

    def cost(self, cost: float) -> None:
        """It really cost its key so much; once, at its end."""
        self._gate.correct(self._entry, cost)


class FairLimiters:
    """One gate for each model, made when it is first asked for."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], int] | None = None) -> None:
        self._enabled = enabled
        self._clock = clock or time.monotonic_ns
        self._gates: dict[str, FairLimiter] = {}

    def precheck(self, model: Model, principal: Principal) -> None:
        """Returns if a small request at the key's highest priority might be let in now.

        Spares a door the work of reading what would be refused.

        Raises:
            Overloaded: it would not.
        """
        gate = self._gates.get(model.label)
        if gate is None or not self._enabled:
            return
        limits = principal.limits
        ask = FairRequest(principal.name, limits.share, limits.max_priority)
        if not gate.would_admit(ask, self._clock()):
            raise _refusal(model, gate)

    def admit(self, model: Model, ask: FairRequest) -> FairPermit:
        """Lets a request in.

        Raises:
            Overloaded: more is asked than can be answered in time; says when to come back.
        """
        now_ns = self._clock()
        gate = self._gates.get(model.label)
        if gate is None:
            if len(self._gates) >= _MOST_GATES:
                # Models come and go with versions; a gate without guests can be made anew.
                self._gates = {name: gate for name, gate in self._gates.items() if gate.unanswered}
            gate = self._gates[model.label] = FairLimiter(now_ns)
        gate.limit.usual_budget_ns = 0 if model.generates else model.default_slo_ns
        if not self._enabled:
            gate.limit.value = float("inf")
        entry = gate.admit(ask, now_ns)
        if entry is None:
            raise _refusal(model, gate)
        return FairPermit(gate, entry, self._clock)

    def interrupted(self) -> None:
        """Nobody scheduled for a while: what waited then says nothing about capacity."""
        now_ns = self._clock()
        for gate in self._gates.values():
            gate.limit.interrupted(now_ns)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Returns per model how much may be unanswered (infinite: any), and how much is."""
        return {name: (gate.limit.value, gate.unanswered) for name, gate in self._gates.items()}


def _refusal(model: Model, gate: FairLimiter) -> Overloaded:
    return Overloaded(
        f"more is asked of model {model.label} than it can answer in time",
        retry_after_ns=gate.retry_after_ns(),
    )


def _for_want_of_capacity(error: BaseException) -> bool:
    if isinstance(error, SloUnattainable):
        # Without advice it is hopeless at any load.
        return error.retry_after_ns is not None
    return isinstance(error, Overloaded | DeadlineExceeded)
