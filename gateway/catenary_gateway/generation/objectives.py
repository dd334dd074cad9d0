"""What a generation was held to, what was promised for it, and what came of it."""

from __future__ import annotations

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.observability.generations import ObjectivesReport


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
