"""The admission limiters of all models, and the errors of requests that they refuse."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from catenary_gateway.catalog import Model
from catenary_gateway.fairness.fair_limiter import FairLimiter, FairRequest, LimiterEntry
from catenary_services.errors import DeadlineExceeded, Overloaded, SloUnattainable
from catenary_services.security.keys import Principal

_MOST_LIMITERS = 4096


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
