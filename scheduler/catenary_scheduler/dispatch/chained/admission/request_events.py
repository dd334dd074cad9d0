"""The way from request to answer: how requests come in, and how gateways end them."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.admission.admission import refusal
from catenary_scheduler.dispatch.chained.admission.adoption import SessionAdoption
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import ARRIVED, CANCELLED, COMPLETED
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import (
    RequestCancelled,
    RequestCompleted,
    SessionRequested,
)


class RequestEvents:
    """Handles what gateways say of requests.

    Args:
        table: The state.
        ledger: Has requests wait, and ends them.
        adoption: Goes on with sessions of earlier schedulers.
    """

    def __init__(
        self, table: SessionTable, ledger: RequestLedger, adoption: SessionAdoption
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._adoption = adoption

    def requested(self, event: SessionRequested) -> None:
        """Admits a request, or answers it at once."""
        table = self._table
        known = table.sequences.get(event.request)
        if known is not None:
            self._adoption.resubmitted(known, event)
            return
        table.counters["arrived_requests"] += 1
        refused = refusal(self._table, event)
        if refused is not None:
            table.counters["rejected_requests"] += 1
            table.commands.append(refused)
            if event.in_flight is not None:
                self._adoption.refused(event.in_flight)
            return
        table.arrival_number += 1
        sequence = SequenceRequest(
            event,
            table.arrival_number,
            table.now if event.arrived_ns is None else event.arrived_ns,
        )
        table.sequences[event.request] = sequence
        if event.prefix_hashes:
            table.model_queue(event.model).prefixes.asked(event.prefix_hashes)
        table.timers.set(sequence, sequence.deadline, len(table.sequences))
        if event.in_flight is None:
            if event.progress is not None:
                sequence.generated_tokens = event.progress.generated_tokens
            table.request_goes(sequence, ARRIVED)
            self._ledger.enqueue(sequence)
        else:
            self._adoption.adopt(sequence, event.in_flight)

    def completed(self, event: RequestCompleted) -> None:
        """Ends a request of which the gateway has every token."""
        table = self._table
        sequence = table.sequences.get(event.request)
        if sequence is None:
            return
        table.counters["completed_requests"] += 1
        if event.progress is not None:
            asked, answer_tokens = sequence.event, event.progress.generated_tokens
            table.lengths_of(sequence.model).learn(
                asked.prompt_tokens, answer_tokens, asked.max_tokens
            )
            placer = table.placer_of(sequence.model)
            if placer is not None:
                placer.loads.ended(sequence, event.progress)
        session = sequence.session
        if session is not None and session.route is not None and session.prefill is None:
            hashes = (*sequence.event.prefix_hashes, *event.prefix_hashes)
            route = session.route
            prefixes = table.model_queue(sequence.model).prefixes
            prefixes.seen(route.hops, hashes, route.room_tokens)
        if sequence.session is not None:
            table.backoff.worked(sequence.session.hops)
            table.breakers_worked(sequence.session)
        self._ledger.forget(sequence, COMPLETED)

    def cancelled(self, event: RequestCancelled) -> None:
        """Ends a request for which its client does not wait any more."""
        sequence = self._table.sequences.get(event.request)
        if sequence is not None:
            self._table.counters["cancelled_requests"] += 1
            self._ledger.forget(sequence, CANCELLED)
