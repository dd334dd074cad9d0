"""The attempts at one call within its time limit; both clients run their calls through this."""

from __future__ import annotations

import random
import time
from typing import Any

from catenary.errors import CatenaryError, DeadlineExceededError, UnavailableError
from catenary.rpc.calls import LOOK_TIMEOUT_S, RpcCall
from catenary.rpc.connection import Connection
from catenary.rpc.targets import Targets


class RetryAttempts:
    """The attempts at one call, with their number and the time since the first.

    With several targets, one that is not available is left at once for the next. When all were
    tried, the retry policy says whether and when to begin with the first again.

    Attributes:
        connection: The connection of the present attempt.
    """

    def __init__(self, call: RpcCall[Any], targets: Targets) -> None:
        self.connection: Connection = targets.current
        self._call = call
        self._targets = targets
        self._left: set[str] = set()
        self._policy = self.connection.retry
        self._limit_s = _limit_s(call, self.connection.timeout_s)
        self._started = time.monotonic()
        self._made = 1

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first attempt began."""
        return time.monotonic() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds left for the call."""
        return max(0.0, self._limit_s - self.elapsed_s)

    def wait_s(self, error: CatenaryError) -> float | None:
        """Returns the seconds to wait before another attempt, None to give up; marks the error."""
        error.request_id = self._call.request_id
        if isinstance(error, UnavailableError):
            self._targets.leave(self.connection)
        if not self._call.repeatable:
            return None
        left = self.remaining_s
        if self._call.slo_ms is not None:
            # The SLO counts from the first attempt, so it bounds the waiting too.
            left = min(left, self._call.slo_ms / 1e3 - self.elapsed_s)
        if isinstance(error, UnavailableError) and error.may_retry and left > 0:
            self._left.add(self.connection.target)
            if self._targets.current.target not in self._left:
                return 0.0
            self._left.clear()
        wait_s = self._policy.wait_s(error, self._made, left, random.random())
        self._made += 1
        return wait_s

    def again(self) -> None:
        """Begins another attempt with the current target, with the time gone taken off the SLO."""
        self.connection = self._targets.current
        self._call.spend(self.elapsed_s)

    def progressed(self) -> None:
        """Counts attempts and time anew: the failed attempt has brought part of the answer."""
        self._made = 1
        self._left.clear()
        if self._call.timeout_s is None:
            self._started = time.monotonic()

    def timeout_error(self) -> DeadlineExceededError:
        """Returns the error of a limit that only the client knows of."""
        return DeadlineExceededError(f"no answer within {self._limit_s:g} s")


def _limit_s(call: RpcCall[Any], usual_s: float) -> float:
    """Returns the limit of a call: the caller's own, else the default for its kind."""
    if call.timeout_s is not None:
        return call.timeout_s
    return min(usual_s, LOOK_TIMEOUT_S) if call.looks_only else usual_s
