"""Batches that an agent holds and the book knows nothing of, as after a change of leader."""

from __future__ import annotations

from collections.abc import Iterable, Set

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.book import Reservation
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    BatchId,
    Nanoseconds,
    ResourceId,
)

_GRACE_NS = NANOSECONDS_PER_SECOND
"""A batch in an agent counts as lost this long after it should be done."""


def queued_reservations(
    agent: AgentId,
    batches: Iterable[scheduler_pb2.BatchInAgent],
    known: Set[BatchId],
    now: Nanoseconds,
) -> list[Reservation]:
    """Returns bookings for the batches an agent holds that the book knows nothing of.

    They run one after the other, the running one first: that is what the device will really do.
    """
    found = []
    moment = now
    for batch in sorted(batches, key=lambda each: not each.running):
        batch_id = BatchId(batch.batch_id)
        if batch_id in known or batch.remaining_ns == 0:
            continue
        end = moment + batch.remaining_ns
        resource = ResourceId(f"gpu/{agent}")
        found.append(Reservation(batch_id, batch.position, resource, moment, end, end + _GRACE_NS))
        moment = end
    return found
