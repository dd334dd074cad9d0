"""Errors of a worker's load due to wrong predictions of lengths (Aladdin, 4.3, Algorithm 2).

Of every worker two numbers are kept between two re-balances: l_e, the tokens, and b_e, the sessions
by which its load exceeds what placement took it for. A session that outgrew its prediction was
thought to be gone, so all of its new prediction is an addition, and so is the session itself
(reading R10); one that ended early left its missing tokens and its place. Each counts once, at the
first re-balance after it shows (R11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from catenary_services.domain.latency import LatencyLines


@dataclass(slots=True)
class WorkerErrors:
    """Errors of one worker since the last re-balance.

    Attributes:
        tokens: l_e, tokens of load; positive: more than placement assumed.
        sessions: b_e, sessions; positive: more than placement assumed.
    """

    tokens: float = 0.0
    sessions: int = 0

    def outgrew(self, repredicted_tokens: float) -> None:
        """Adds a session that generated more than was predicted, with its new prediction."""
        self.tokens += repredicted_tokens
        self.sessions += 1

    def ended_early(self, predicted_tokens: float, real_tokens: int) -> None:
        """Adds a session that ended with fewer tokens than were predicted."""
        self.tokens += real_tokens - predicted_tokens
        self.sessions -= 1

    def sign(self, lines: LatencyLines) -> int:
        """Returns 1 if the worker's steps take longer than was thought, -1 if less, else 0."""
        error = error_line(lines, self).constant
        return (error < 0) - (error > 0)


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """The equivalent error function, a line `alpha * l + beta * b + constant = 0` (reading R12).

    It is eq. 4's line shifted through (l_e, b_e): all errors on it change the time of a step alike,
    by `-constant`.
    """

    alpha: float
    beta: float
    constant: float

    @property
    def distance(self) -> float:
        """Distance of the line from the origin, which stands for no error."""
        slope = math.hypot(self.alpha, self.beta)
        return abs(self.constant) / slope if slope else 0.0


def error_line(lines: LatencyLines, errors: WorkerErrors) -> ErrorLine:
    """Returns the error function of a worker; alpha and beta in nanoseconds."""
    alpha, beta = lines.decode_context_token_ns, lines.decode_session_ns
    return ErrorLine(alpha, beta, -(alpha * errors.tokens + beta * errors.sessions))
