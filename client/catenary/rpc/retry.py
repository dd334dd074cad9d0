"""The policy by which failed requests are sent again. Pure.

gRPC itself repeats calls that provably never left the client or were refused unprocessed; that
needs no policy and is always on. Everything else is repeated only if the caller passes a
`RetryPolicy`. It is never the default, because the server already re-dispatches lost work within
the deadline, and a client that repeats what an overloaded server refused makes the overload worse.
With a policy, a request keeps its id and its total time: advice that points past the limit is not
waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary.errors import CatenaryError, InvalidInputError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts at a call, and the waits between them.

    Attributes:
        attempts: The most executions of one call, the first included.
        initial_backoff_s: Wait before the second attempt, where the server gives no advice.
        max_backoff_s: The longest such wait; each is `multiplier` times the one before.
        multiplier: Growth of the wait.
    """

    attempts: int = 4
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidInputError.at("attempts", "must be at least 1")
        if self.initial_backoff_s < 0 or self.max_backoff_s < self.initial_backoff_s:
            raise InvalidInputError.at("max_backoff_s", "must be at least initial_backoff_s")
        if self.multiplier < 1:
            raise InvalidInputError.at("multiplier", "must be at least 1")

    def wait_s(
        self, error: CatenaryError, attempt: int, remaining_s: float, luck: float
    ) -> float | None:
        """Returns the seconds to wait before the next attempt, None if there should be none.

        Args:
            error: The error of the last attempt.
            attempt: Number of attempts made so far, from 1.
            remaining_s: Time left for the whole call.
            luck: A random number in 0..1, which spreads clients that failed together.
        """
        if attempt >= self.attempts or not error.retryable:
            return None
        if error.retry_after_s is not None:
            # Never earlier than advised; a little later, so that not all return at once.
            wait = error.retry_after_s * (1 + 0.1 * luck)
        else:
            ceiling = self.initial_backoff_s * self.multiplier ** (attempt - 1)
            wait = min(self.max_backoff_s, ceiling) * (0.5 + 0.5 * luck)
        return wait if wait < remaining_s else None
