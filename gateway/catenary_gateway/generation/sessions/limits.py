"""The time limits of an answer: for its first token, for each next one, and for all of it."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_gateway.generation.request import GenerationRequest
from catenary_gateway.inference import LONGEST_BUDGET_NS, RequestArrival

FIRST_TOKEN_NS = 300_000_000_000
"""Nanoseconds from arrival to the first token, if neither the model nor the request names an
objective."""
SILENCE_NS = 60_000_000_000
"""Nanoseconds without a further token after which an answer is given up. This is longer than the
recovery from any loss of an agent, with time in the queue after it."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The time limits of one answer; points in time are on the monotonic clock.

    An answer of a client that named no time for the whole of it may take up to
    `LONGEST_BUDGET_NS`, as long as tokens keep coming.
    """

    whole_ns: int
    """Time at which the whole answer must be complete."""
    first_token_ns: int
    """Time at which the first token must have come."""
    silence_ns: int
    """Nanoseconds that may pass without a further token."""

    def due_ns(self, last_token_ns: int) -> int:
        """Returns the time at which the answer is given up if no further token comes.

        `last_token_ns` is 0 before the first token.
        """
        next_ns = last_token_ns + self.silence_ns if last_token_ns else self.first_token_ns
        return min(self.whole_ns, next_ns)

    def stage_at(self, now_ns: int, last_token_ns: int) -> str:
        """Returns a phrase that says which of the limits has passed."""
        if now_ns >= self.whole_ns:
            return "the deadline passed"
        if last_token_ns:
            return f"no token came for {self.silence_ns / 1e9:g} s"
        return "no first token came in time"


def limits_of(request: GenerationRequest, arrival: RequestArrival, silence_ns: int) -> AnswerLimits:
    """Returns the limits of a request.

    The time for the whole answer is what the client says, in the request or as the deadline of its
    call. The model's objective applies to the first token only.
    """
    said = [ns for ns in (request.options.deadline_ns, arrival.budget_ns) if ns is not None]
    whole_ns = min(*said, LONGEST_BUDGET_NS) if said else LONGEST_BUDGET_NS
    first_ns = max(request.model.default_slo_ns, request.options.time_to_first_token_ns or 0)
    begins_ns = arrival.monotonic_ns
    return AnswerLimits(begins_ns + whole_ns, begins_ns + (first_ns or FIRST_TOKEN_NS), silence_ns)
