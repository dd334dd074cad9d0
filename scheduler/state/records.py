"""How reservations and batches look in Redis, and the same ones on a successor's clock."""

from __future__ import annotations

import json
from collections.abc import Iterable

from scheduler.book import Reservation, ReservationChange
from scheduler.dispatch.events import DispatchBatch
from scheduler.state.journal import Fields, Journal
from scheduler.state.keys import Table, book_table
from services.domain.ids import BatchId, Nanoseconds, ResourceId, SessionId


def write_reservations(journal: Journal, changes: Iterable[ReservationChange]) -> None:
    """Puts the book's own journal into ours."""
    # Most reservations are made, corrected and released between two flushes: only the last counts.
    latest: dict[tuple[ResourceId, str], ReservationChange] = {}
    for change in changes:
        r = change.reservation
        latest[r.resource, _name_of(r)] = change
    for resource in {key[0] for key in latest}:
        journal.put(Table.RESOURCES, resource, "1")
    for change in latest.values():
        r = change.reservation
        value = _value_of(r) if change.op == "put" else None
        journal.put(book_table(r.resource), _name_of(r), value)


def tables_of(reservations: Iterable[Reservation]) -> dict[str, Fields]:
    """Returns the reservation tables of a whole book, and the list of its resources."""
    tables: dict[str, Fields] = {Table.RESOURCES: {}}
    for reservation in reservations:
        tables[Table.RESOURCES][reservation.resource] = "1"
        table = tables.setdefault(book_table(reservation.resource), {})
        table[_name_of(reservation)] = _value_of(reservation)
    return tables


def reservations_of(
    book: dict[ResourceId, dict[str, str]], shift_ns: Nanoseconds
) -> list[Reservation]:
    """Returns the stored reservations, `shift_ns` later; what cannot be read is left out."""
    found = []
    for resource, fields in book.items():
        for name, value in fields.items():
            reservation = _reservation_of(resource, name, value, shift_ns)
            if reservation is not None:
                found.append(reservation)
    return found


def batch_record(batch: DispatchBatch) -> str:
    """Returns a batch in flight as JSON, for people and dashboards as much as for recovery."""
    return json.dumps(
        {
            "rows": batch.rows,
            "expected_finish_ns": batch.expected_finish_ns,
            "path": [
                [hop.agent, str(hop.partition), hop.start_ns, hop.duration_ns] for hop in batch.path
            ],
            "slices": [
                [str(piece.request), piece.request_row, piece.rows, piece.batch_row]
                for piece in batch.slices
            ],
        },
        separators=(",", ":"),
    )


def _name_of(reservation: Reservation) -> str:
    """Returns the owner within its resource: a cache has sessions, everything else batches."""
    r = reservation
    return f"{r.session if r.slots else r.batch}:{r.position}"


def _value_of(reservation: Reservation) -> str:
    r = reservation
    value = f"{r.start_ns} {r.end_ns} {r.expires_ns} {int(r.done)}"
    return f"{value} {r.slots}" if r.slots else value


def _reservation_of(
    resource: ResourceId, name: str, value: str, shift_ns: Nanoseconds
) -> Reservation | None:
    try:
        owner, position = (int(part) for part in name.split(":"))
        start, end, expires, done, *counted = (int(part) for part in value.split())
        slots = counted[0] if counted else 0
    except ValueError:
        return None  # written by another version; a reservation less is corrected by reports
    return Reservation(
        BatchId(0 if slots else owner), position, resource,
        start + shift_ns, end + shift_ns, expires + shift_ns, bool(done),
        slots, SessionId(owner if slots else 0),
    )  # fmt: skip
