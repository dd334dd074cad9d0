"""When an unfinished answer is given up: how long it may take, to begin, to go on, and in all."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_gateway.generation.request import GenerationRequest
from catenary_gateway.inference import LONGEST_BUDGET_NS, Arrival

FIRST_TOKEN_NS = 300_000_000_000
"""For models that name no objective of their own."""
SILENCE_NS = 60_000_000_000
"""Longer than any agent's loss takes to be made good, with room in the queue behind it."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The limits of one answer, on the monotonic clock.

    A client that named no time for the whole answer has none to keep to, however long the answer
    is, as long as it begins and goes on.
    """

    whole_ns: int
    """When all of it must be there; hours from its arrival if nobody asked for less."""
    first_token_ns: int
    """When its first token must be there."""
    silence_ns: int
    """How long it may be without a further token."""

    def due_ns(self, last_token_ns: int) -> int:
        """Returns when it is given up if nothing more comes; `last_token_ns` is 0 before any."""
        next_ns = last_token_ns + self.silence_ns if last_token_ns else self.first_token_ns
        return min(self.whole_ns, next_ns)

    def stage_at(self, now_ns: int, last_token_ns: int) -> str:
        """Returns, in words, which of the limits has passed."""
        if now_ns >= self.whole_ns:
            return "the deadline passed"
        if last_token_ns:
            return f"no token came for {self.silence_ns / 1e9:g} s"
        return "no first token came in time"


def limits_of(request: GenerationRequest, arrival: Arrival, silence_ns: int) -> AnswerLimits:
    """Returns the limits of a request.

    The time for the whole answer is what its client says, in the request or as its own deadline;
    the model's objective is for the first token alone.
    """
    said = [ns for ns in (request.terms.deadline_ns, arrival.budget_ns) if ns is not None]
    whole_ns = min(*said, LONGEST_BUDGET_NS) if said else LONGEST_BUDGET_NS
    first_ns = max(request.model.default_slo_ns, request.terms.time_to_first_token_ns or 0)
    begins_ns = arrival.monotonic_ns
    return AnswerLimits(begins_ns + whole_ns, begins_ns + (first_ns or FIRST_TOKEN_NS), silence_ns)
