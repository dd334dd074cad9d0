"""Reports on a generation: its times beside its objectives, and the changes of its chain.

A chain changes by a live move, or by a restart after a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.generation.sessions.start import SessionStart
from catenary_gateway.observability.generations import RESTART, ChainChange, ObjectivesReport
from catenary_protos.catenary.v1 import common_pb2


def objectives_report(session: PendingSession) -> ObjectivesReport:
    """Returns a generation's times, objectives and predictions, as of its latest token."""
    options, starts = session.request.options, session.starts
    order = starts[-1].order if starts else None
    first_slo_ns = order.first_token_slo_ns if order is not None else 0
    per_token_slo_ns = order.per_token_slo_ns if order is not None else 0
    fruitful = _fruitful(session)
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


def chain_changes(session: PendingSession) -> tuple[ChainChange, ...]:
    """Returns the chain changes of an answer, in order.

    Only chains count that have brought a token to the client.
    """
    return tuple(
        ChainChange(
            how=RESTART if start.moves is None else start.mode,
            generated_tokens=start.history_tokens,
            after_ns=start.first_token_ns - session.arrival.monotonic_ns,
            stall_ns=start.first_token_ns - before.last_token_ns,
            from_agents=_agents(before.ring),
            to_agents=_agents(start.ring),
        )
        for before, start in pairwise(_fruitful(session))
    )


def _agents(ring: Sequence[common_pb2.Hop]) -> tuple[str, ...]:
    return tuple(hop.agent_id for hop in ring)


def _fruitful(session: PendingSession) -> list[SessionStart]:
    return [start for start in session.starts if start.first_token_ns]
