"""Tells the queues which chains may be used, and what was freed on them."""

from __future__ import annotations

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.sessions.misplaced import MisplacedSessions
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import RESUMED


class ChainOffers:
    """Offers chains to the queues of their models.

    Args:
        table: The state.
        misplaced: Finds the sessions that must move once agents drain.
    """

    def __init__(self, table: SessionTable, misplaced: MisplacedSessions) -> None:
        self._table = table
        self._misplaced = misplaced

    def refresh(self) -> None:
        """Updates which chains may be used."""
        table = self._table
        table.availability_seen = table.availability.version
        for model, model_queue in table.model_queues.items():
            model_queue.refresh(table.availability)
            table.dirty[model] = None
        for request, sequence in list(table.resting.items()):
            if not table.model_queue(sequence.model).must_rest:
                del table.resting[request]
                table.request_goes(sequence, RESUMED)
                table.model_queue(sequence.model).waiting.push(sequence)
        draining = table.availability.impaired_by(Impairment.DRAINING)
        if draining != table.draining:
            table.draining = draining
            self._misplaced.find()

    def were_freed(self, caches: list[Cache]) -> None:
        """Lets requests start where slots were freed."""
        table = self._table
        for cache in caches:
            model = cache.partition.model
            model_queue = table.model_queues.get(model)
            if model_queue is not None:
                model_queue.waiting.freed(cache)
                table.dirty[model] = None

    def session_left(self, route: ChainState, *, is_end: bool = False) -> None:
        """Lets requests start on a route that a session left, perhaps because it has ended."""
        table, model = self._table, route.hops[0].partition.model
        model_queue = table.model_queues.get(model)
        if model_queue is not None:
            if is_end:
                model_queue.session_ended(table.now)
            model_queue.waiting.offer(route)
            table.dirty[model] = None
