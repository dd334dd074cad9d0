"""What a generation was held to, what was promised for it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_gateway.generation.session import PendingSession


@dataclass(frozen=True, slots=True)
class ObjectivesReport:
    """Times of one generation, in nanoseconds.

    Attributes:
        first_token_slo_ns: Most time from its arrival to its first token; 0: any.
        per_token_slo_ns: Most mean time per token behind the first; 0: any.
        first_token_ns: What the first took; 0: there was none.
        per_token_ns: The mean time per token behind the first; 0: there was none.
        predicted_first_token_ns: What the scheduler expected when it started it; 0: nothing.
        predicted_per_token_ns: The same, per token behind the first.
        complete: It came to its end.
    """

    first_token_slo_ns: int
    per_token_slo_ns: int
    first_token_ns: int
    per_token_ns: int
    predicted_first_token_ns: int
    predicted_per_token_ns: int
    complete: bool

    @property
    def met_first_token(self) -> bool:
        """True if the first token came in time; also if it did not have to."""
        if not self.first_token_slo_ns:
            return True
        return 0 < self.first_token_ns <= self.first_token_slo_ns

    @property
    def met_per_token(self) -> bool:
        """True if the others came fast enough; also if they did not have to.

        An answer of one token has no others. One that broke off cannot have met this.
        """
        if not self.per_token_slo_ns:
            return True
        return self.complete and self.per_token_ns <= self.per_token_slo_ns

    @property
    def met(self) -> bool:
        """True if both objectives were met."""
        return self.met_first_token and self.met_per_token


def objectives_report(session: PendingSession) -> ObjectivesReport:
    """Returns how a generation does, as of its latest token."""
    terms, starts = session.request.terms, session.starts
    order = starts[-1].order if starts else None
    first_slo_ns = order.first_token_slo_ns if order is not None else 0
    per_token_slo_ns = order.per_token_slo_ns if order is not None else 0
    fruitful = [start for start in starts if start.first_token_ns]
    own_tokens = len(session.generated) - session.continued
    first_ns, behind = session.first_token_ns, own_tokens - 1
    return ObjectivesReport(
        # A scheduler that does not place by objectives names none; they are counted all the same.
        first_token_slo_ns=first_slo_ns or terms.time_to_first_token_ns or 0,
        per_token_slo_ns=per_token_slo_ns or terms.time_per_output_token_ns or 0,
        first_token_ns=first_ns - session.arrival.monotonic_ns if first_ns else 0,
        per_token_ns=(session.last_token_ns - first_ns) // behind if behind > 0 else 0,
        predicted_first_token_ns=fruitful[0].order.predicted_first_token_ns if fruitful else 0,
        # Of one that went on elsewhere, no single chain's promise says anything about the mean.
        predicted_per_token_ns=(
            fruitful[0].order.predicted_per_token_ns if len(fruitful) == 1 else 0
        ),
        complete=bool(session.finish_reason),
    )
