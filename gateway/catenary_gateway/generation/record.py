"""The record of a generation that has ended: its waterfall, its objectives, and its chains.

A chain changes by a live move, or by a restart after a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.generation.sessions.start import SessionStart
from catenary_gateway.observability.generations import (
    RESTART,
    ChainChange,
    ObjectivesReport,
    SessionRecord,
    WaterfallSpan,
)
from catenary_gateway.observability.outcomes import FinishedRequest
from catenary_gateway.results.pending import HopTimes
from catenary_protos.catenary.v1 import common_pb2


def finished_session(
    session: PendingSession, outcome: str, finished_ns: int, gateway_id: str
) -> FinishedRequest:
    """Returns the record that is kept of a generation after its end."""
    request = session.request
    record = SessionRecord(
        operation=request.operation,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(session.generated) - session.continued,
        max_tokens=request.sampling.max_tokens,
        finish_reason=session.finish_reason,
        first_token_ns=session.first_token_ns,
        last_token_ns=session.last_token_ns,
        objectives=objectives_report(session),
        bars=tuple(_bars_of(session, finished_ns, gateway_id)),
        chain_changes=chain_changes(session),
    )
    return FinishedRequest(
        request.id,
        request.model.label,
        outcome,
        session.arrival,
        session.submitted_ns,
        finished_ns,
        (),
        record,
        number=session.number,
    )


def _bars_of(session: PendingSession, finished_ns: int, gateway_id: str) -> Iterator[WaterfallSpan]:
    """Yields the waterfall: the queue, the first token hop by hop, then the sums of later tokens.

    Agents report durations only, so the bars of hops are laid end to end; after the first token a
    bar is the sum over all later tokens. A start that takes over by a live move has no queue.
    Instead it has a bar from the order to move to its first token, while the start before it goes
    on, and a bar of the time in which the client gets no token.
    """
    waiting_ns = session.submitted_ns or finished_ns
    for number, start in enumerate(session.starts, 1):
        if start.moves is None:
            yield WaterfallSpan(
                "gateway.queue", gateway_id, waiting_ns, start.started_ns, 0, number
            )
            waiting_ns = max(start.started_ns, start.sent_ns)
        yield from _bars_of_start(start, gateway_id, number, finished_ns)
        waiting_ns = max(waiting_ns, start.last_token_ns)
    if not session.starts:
        yield WaterfallSpan("gateway.queue", gateway_id, waiting_ns, finished_ns)


def _bars_of_start(
    start: SessionStart, gateway_id: str, number: int, finished_ns: int
) -> Iterator[WaterfallSpan]:
    def bar(name: str, begin_ns: int, end_ns: int) -> WaterfallSpan:
        return WaterfallSpan(name, gateway_id, begin_ns, end_ns, start.session_id, number)

    before = start.moves
    if before is not None:
        end_ns = start.first_token_ns or start.failed_ns or finished_ns
        yield bar("gateway.move", start.started_ns, end_ns)
    elif start.sent_ns:
        yield bar("gateway.send", start.started_ns, start.sent_ns)
    if not start.first_token_ns:
        return
    begin_ns = start.push_ns if before is None else before.last_token_ns
    yield bar(
        "gateway.first_token" if before is None else "gateway.stall",
        begin_ns,
        start.first_token_ns,
    )
    yield from _hops(start, start.first_hops, (begin_ns, start.first_token_ns), number)
    if start.last_token_ns > start.first_token_ns:
        span = (start.first_token_ns, start.last_token_ns)
        yield bar("gateway.next_tokens", *span)
        yield from _hops(start, start.later_hops.values(), span, number)


def _hops(
    start: SessionStart,
    timings: Iterable[HopTimes],
    span: tuple[int, int],
    number: int,
) -> Iterator[WaterfallSpan]:
    at_ns, latest_ns = span
    for timing in timings:
        for name, duration_ns in timing.phases:
            # Clocks of machines drift apart, so a bar is cut at the time of the token.
            end_ns = min(at_ns + duration_ns, max(at_ns, latest_ns))
            yield WaterfallSpan(name, timing.agent_id, at_ns, end_ns, start.session_id, number)
            at_ns = end_ns


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
