"""Reports that compare a generation's times with its objectives and the predictions for it."""

from __future__ import annotations

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.observability.generations import ObjectivesReport


def objectives_report(session: PendingSession) -> ObjectivesReport:
    """Returns a generation's times, objectives and predictions, as of its latest token."""
    options, starts = session.request.options, session.starts
    order = starts[-1].order if starts else None
    first_slo_ns = order.first_token_slo_ns if order is not None else 0
    per_token_slo_ns = order.per_token_slo_ns if order is not None else 0
    fruitful = [start for start in starts if start.first_token_ns]
    own_tokens = len(session.generated) - session.continued
    first_ns, behind = session.first_token_ns, own_tokens - 1
    return ObjectivesReport(
        # A scheduler that does not place by objectives names none: the client's are counted then.
        first_token_slo_ns=first_slo_ns or options.time_to_first_token_ns or 0,
        per_token_slo_ns=per_token_slo_ns or options.time_per_output_token_ns or 0,
        first_token_ns=first_ns - session.arrival.monotonic_ns if first_ns else 0,
        per_token_ns=(session.last_token_ns - first_ns) // behind if behind > 0 else 0,
        predicted_first_token_ns=fruitful[0].order.predicted_first_token_ns if fruitful else 0,
        # A prediction is for one chain and says nothing about a mean over several.
        predicted_per_token_ns=(
            fruitful[0].order.predicted_per_token_ns if len(fruitful) == 1 else 0
        ),
        complete=bool(session.finish_reason),
    )
