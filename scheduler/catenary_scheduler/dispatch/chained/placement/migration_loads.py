"""The load of sessions that move: each counts at both workers until its move is over.

The session runs on one worker and is about to run on the other. So no request is placed on what it
leaves before it has left, nor on what it takes.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.worker_loads import WorkerLoads
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds, RequestId


class MigrationLoads(WorkerLoads):
    """The part of the placer that handles moves."""

    def worker_of(self, route: ChainState) -> Worker:
        """Returns the worker of a route."""
        return self._worker(route)

    def reserve(
        self, sequence: SequenceRequest, route: ChainState, now: Nanoseconds, *, runs_again: bool
    ) -> None:
        """Counts a session that moves at its target too; it keeps its running sequence.

        Args:
            sequence: Its request.
            route: The route that it moves to.
            now: The moment.
            runs_again: True if its tokens are computed again there, which delays the sessions
                there.
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
        """Stops counting a session at the target of a move that failed."""
        held = self._coming.pop(request, None)
        if held is not None:
            held[0].remove(request)

    def moved(self, request: RequestId) -> None:
        """Counts a session only at the target of its move, where it generates now."""
        coming = self._coming.pop(request, None)
        self.leave(request)
        if coming is not None:
            self._running[request] = coming
