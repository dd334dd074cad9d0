"""Conversion of the reservation book to its tables, and the check of restored reservations."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Final, cast

from catenary_scheduler.book import Reservation, ReservationChange
from catenary_scheduler.dispatch.events import DispatchBatch
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable, book_table
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import (
    Link,
    Measurement,
    Place,
    ServerLink,
    StoredBatch,
    StoredBatchHop,
    StoredBatchSlice,
    StoredComputeTimes,
    StoredCost,
    StoredMeasurements,
    StoredServerLink,
)
from catenary_scheduler.storage.values.tables import (
    RecordDamage,
    agent_of_resource,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds, ResourceId

_FARTHEST_NS: Final = 3600 * NANOSECONDS_PER_SECOND
"""No work is booked further ahead than this."""
_LONGEST_NS: Final = 7 * 24 * _FARTHEST_NS
"""No session is kept for longer than this."""


def write_reservations(
    journal: Journal,
    changes: Iterable[ReservationChange],
    listed: dict[ResourceId, str] | None = None,
) -> None:
    """Writes changes of the book into the journal; a later change of a reservation wins.

    Args:
        journal: The journal.
        changes: What changed, in order.
        listed: The tables of the resources that Redis lists already; new ones are added.
    """
    if listed is None:
        listed = {}
    for change in changes:
        r = change.reservation
        table = listed.get(r.resource)
        if table is None:
            table = listed[r.resource] = book_table(r.resource)
            journal.put(RedisTable.RESOURCES, r.resource, "1")
        journal.put(table, owner_name(r), reservation_text(r) if change.op == "put" else None)


def owner_name(reservation: Reservation) -> str:
    """Returns the owner within its resource: a cache has sessions, everything else batches."""
    r = reservation
    return f"{r.session if r.slots else r.batch}:{r.position}"


def reservation_text(reservation: Reservation) -> str:
    """Returns a reservation in the form of a table of the book."""
    r = reservation
    value = f"{r.start_ns} {r.end_ns} {r.expires_ns} {int(r.done)}"
    return f"{value} {r.slots}" if r.slots else value


def tables_of(reservations: Iterable[Reservation]) -> dict[str, Fields]:
    """Returns the reservation tables of a whole book, and the table of its resources."""
    tables: dict[str, Fields] = {RedisTable.RESOURCES: {}}
    for reservation in reservations:
        tables[RedisTable.RESOURCES][reservation.resource] = "1"
        table = tables.setdefault(book_table(reservation.resource), {})
        table[owner_name(reservation)] = reservation_text(reservation)
    return tables


def believable(
    reservations: list[Reservation],
    resource: ResourceId,
    written_ns: Nanoseconds,
    agents: Container[str],
) -> tuple[list[Reservation], list[RecordDamage]]:
    """Splits restored reservations into those that can be true, and damage.

    Args:
        reservations: All reservations of one resource.
        resource: The resource of an agent or a server.
        written_ns: The last moment at which anything was written, on the clock of the reservations.
        agents: The agents that were known; empty if that could not be read.
    """
    owner = agent_of_resource(resource)
    if agents and owner is not None and owner not in agents:
        why = f"there is no agent {owner}"
        return [], [_damage(each, why) for each in reservations]
    good, damaged = [], []
    for each in reservations:
        latest_ns = written_ns + (_LONGEST_NS if each.slots else _FARTHEST_NS)
        if max(each.start_ns, each.end_ns, each.expires_ns) > latest_ns:
            damaged.append(_damage(each, "lies too far in the future"))
        else:
            good.append(each)
    return good, damaged


def shifted(reservations: Iterable[Reservation], shift_ns: Nanoseconds) -> list[Reservation]:
    """Returns the same reservations, later by `shift_ns`."""
    return [
        replace(
            each,
            start_ns=each.start_ns + shift_ns,
            end_ns=each.end_ns + shift_ns,
            expires_ns=each.expires_ns + shift_ns,
        )
        for each in reservations
    ]


def measurements_of(
    records: Mapping[Place | Link | ServerLink, Measurement],
) -> StoredMeasurements:
    """Sorts the records of the table of measurements into times, costs and links."""
    times: dict[Place, StoredComputeTimes] = {}
    costs: dict[Place, StoredCost] = {}
    links: dict[Link, int] = {}
    server_links: dict[ServerLink, StoredServerLink] = {}
    for name, value in records.items():
        if isinstance(value, int):
            links[cast(Link, name)] = value
        elif isinstance(value, StoredServerLink):
            server_links[cast(ServerLink, name)] = value
        elif isinstance(value, StoredCost):
            costs[cast(Place, name)] = value
        else:
            times[cast(Place, name)] = value
    return StoredMeasurements(times, costs, links, server_links)


def batch_text(batch: DispatchBatch) -> str:
    """Returns a batch in flight as JSON, for people and dashboards."""
    path = [
        StoredBatchHop(hop.agent, str(hop.partition), hop.start_ns, hop.duration_ns)
        for hop in batch.path
    ]
    slices = [
        StoredBatchSlice(str(piece.request), piece.request_row, piece.rows, piece.batch_row)
        for piece in batch.slices
    ]
    return encode_document(StoredBatch(batch.rows, batch.expected_finish_ns, path, slices))


def _damage(reservation: Reservation, why: str) -> RecordDamage:
    value = reservation_text(reservation).encode()
    name = owner_name(reservation).encode()
    return RecordDamage(book_table(reservation.resource), name, why, value, len(value))
