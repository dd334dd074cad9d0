"""The attempts at one call, all within one limit; both clients run their calls through it."""

from __future__ import annotations

import random
import time
from typing import Any

from catenary.calls import Call
from catenary.connection import Connection
from catenary.errors import CatenaryError, DeadlineExceededError


class Attempts:
    """Counts attempts and time from the moment it is made."""

    def __init__(self, call: Call[Any], connection: Connection) -> None:
        self._call = call
        self._policy = connection.retry
        self._limit_s = connection.timeout_s if call.timeout_s is None else call.timeout_s
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
        """Returns the wait before another attempt, or None to give up; marks the error."""
        error.request_id = self._call.request_id
        if not self._call.repeatable:
            return None
        left = self.remaining_s
        if self._call.slo_ms is not None:
            # The SLO counts from the first attempt, so it bounds the waiting too.
            left = min(left, self._call.slo_ms / 1e3 - self.elapsed_s)
        return self._policy.wait_s(error, self._made, left, random.random())

    def again(self) -> None:
        """Counts another attempt and takes the time gone off the request's SLO."""
        self._made += 1
        self._call.spend(self.elapsed_s)

    def out_of_patience(self) -> DeadlineExceededError:
        """Returns the error for a limit that only this side knows of."""
        return DeadlineExceededError(f"no answer within {self._limit_s:g} s")
