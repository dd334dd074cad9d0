"""The queues in front of an engine: a session waits outside them until its next token is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_agent.generation.state.partition_batcher import PartitionBatcher, StepDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catenary_agent.engines.executor import EngineExecutor
    from catenary_agent.generation.state.partition_batcher import QueuedSession, StepSize
    from catenary_services.domain.ids import Nanoseconds


class EngineBatcher(PartitionBatcher):
    """An engine and the sessions that it serves.

    Invariant: a session with the state QUEUED is in one of the queues, or it is parked; then no
    token of it is here, and when one comes it is woken.
    """

    def __init__(self, executor: EngineExecutor) -> None:
        """Queues for an engine, which was measured and keeps answers to their grammars."""
        super().__init__(executor, cost=executor.cost)
        self._engine = executor

    @property
    def queued(self) -> list[int]:
        return [*super().queued, *self._engine.parked]

    def queue(self, session: QueuedSession, now_ns: Nanoseconds) -> None:
        """Queues a session if its next token is here, or its tokens are read; else it is parked."""
        if self._is_ready_for(session):
            super().queue(session, now_ns)
        else:
            self._engine.parked.add(session.spec.session_id)

    def queue_first(self, session: QueuedSession, now_ns: Nanoseconds) -> None:
        """Does the same: the engine decides what it computes first."""
        self.queue(session, now_ns)

    def wake(self, session: QueuedSession) -> None:
        """Queues a session that was parked, if its next token is here.

        It need not be: the news may be of a token that the session took before it was parked.
        """
        session_id = session.spec.session_id
        if session_id in self._engine.parked and self._is_ready_for(session):
            self._engine.parked.remove(session_id)
            super().wake(session)

    def _is_ready_for(self, session: QueuedSession) -> bool:
        """Returns True if a step can take what it wants of a session; else the engine is asked."""
        if session.incoming is not None:
            return self._engine.has_read(session)
        return self._engine.has_next(session)

    def count(self, size: StepSize, times: tuple[int, int]) -> Sequence[StepDone]:
        """Counts the steps that the engine has made, instead of one that took their tokens."""
        return [
            done
            for engine_size, engine_times in self._engine.rounds.take()
            for done in super(EngineBatcher, self).count(engine_size, engine_times)
        ]
