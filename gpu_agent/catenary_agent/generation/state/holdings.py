"""The answer of an agent to the scheduler's audit: the sessions and partitions it holds.

An answer is made on the generation thread, behind every order that came before the question, and is
sent behind every message that was queued before. Whatever is missing from it was thus reported to
the scheduler earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from catenary_agent.generation.state.reporting import key_message
from catenary_protos.catenary.v1 import scheduler_pb2

if TYPE_CHECKING:
    from catenary_agent.engine.partitions import LoadedPartition
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import Session


class HoldingsAnswer:
    """An `OutgoingMessage` in two parts: that of the generation thread and the event loop's."""

    droppable = True
    is_as_booked = False

    def __init__(
        self,
        number: int,
        sessions: Iterable[Session],
        leads: Iterable[int],
        batchers: Sequence[PartitionBatcher],
    ) -> None:
        """Describes what generation holds; runs on its thread.

        Args:
            number: The number of the question.
            sessions: The sessions that have slots here.
            leads: The new ids of the sessions whose moves are led here.
            batchers: Every decoder partition whose memory is not free yet.
        """
        self._holdings = scheduler_pb2.Holdings(
            number=number,
            sessions=[_session(each) for each in sessions],
            leads_moves_to=leads,
            partitions=[_caches(batcher) for batcher in batchers],
        )

    def complete(
        self, batches: Iterable[scheduler_pb2.BatchInAgent], hosted: Iterable[LoadedPartition]
    ) -> None:
        """Adds the event loop's part, when the message takes its place in the queue."""
        self._holdings.batches.extend(batches)
        for each in hosted:
            self._holdings.partitions.add(
                key=key_message(each.key), memory_bytes=each.executor.memory_bytes
            )

    def message(self) -> scheduler_pb2.AgentMessage:
        return scheduler_pb2.AgentMessage(holdings=self._holdings)


def _session(session: Session) -> scheduler_pb2.SessionInAgent:
    spec = session.spec
    return scheduler_pb2.SessionInAgent(
        session_id=spec.session_id,
        route=[spec.own_hop],
        gateway_id=spec.opening.gateway_id,
        request_id=spec.opening.request_id,
        partition=key_message(session.batcher.key),
        # Rows that wait for a slow link have not been handed over, and the opening is among them.
        passed_on=session.introduced and not session.unsent,
    )


def _caches(batcher: PartitionBatcher) -> scheduler_pb2.PartitionInAgent:
    executor = batcher.executor
    return scheduler_pb2.PartitionInAgent(
        key=key_message(batcher.key),
        memory_bytes=executor.memory_bytes,
        block_slots=executor.layout.block_slots,
        used_block_slots=batcher.used_block_slots,
        cached_block_tokens=executor.cached_block_tokens,
    )
