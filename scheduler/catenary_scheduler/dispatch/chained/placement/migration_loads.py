"""Seats of sessions that move: one at each worker until the move is over.

The session runs on one worker and is about to run on the other, so it counts at both: nobody is
placed over what it leaves before it has left, nor over what it takes.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.worker_loads import WorkerLoads
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds, RequestId


class MigrationLoads(WorkerLoads):
    """What the placer knows of moves."""

    def worker_of(self, route: ChainState) -> Worker:
        """Returns the worker that a route is."""
        return self._worker(route)

    def reserve(
        self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds, *, runs_again: bool
    ) -> None:
        """A session is on its way to a route; it keeps its running sequence.

        Args:
            sequence: Its request.
            route: Where it moves to.
            now: The moment.
            runs_again: Its tokens are read there, which takes time from those who are there.
        """
        held = self._running.get(sequence.request)
        if held is None:
            return
        worker, running = self._worker(route), held[1].copied()
        worker.add(running)
        self._coming[sequence.request] = (worker, running)
        if runs_again:
            tokens = running.prompt_tokens + running.generated_tokens
            self.prompt_share.took(worker.lines.prefill(tokens), now)

    def unreserve(self, request: RequestId) -> None:
        """A session does not move."""
        held = self._coming.pop(request, None)
        if held is not None:
            held[0].remove(request)

    def moved(self, request: RequestId) -> None:
        """A session generates where it moved to."""
        coming = self._coming.pop(request, None)
        self.leave(request)
        if coming is not None:
            self._running[request] = coming
