"""Converters from messages of the Admin service to JSON values (pure).

Fields keep their names. Numbers stay numbers, but ids of 64 bits become strings: a browser's
numbers are exact only up to 2**53. Bookings, of which there are thousands, are rows, not objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from catenary_protos.catenary.v1 import admin_pb2

BOOKING_COLUMNS = (
    "batch_id",
    "model",
    "rows",
    "booked_start_us",
    "booked_end_us",
    "real_start_us",
    "real_end_us",
)
"""Columns of a booking's row; `model` is an index into `models`."""
_IDS = frozenset({"batch_id", "session_id", "request_number"})


def values_of(message: Message) -> dict[str, Any]:
    """Returns every field of `message` by name; an absent message is None."""
    return {each.name: _value(message, each) for each in message.DESCRIPTOR.fields}


def timelines(answer: admin_pb2.GetTimelinesResponse) -> dict[str, object]:
    """Returns all bookings, with times in whole microseconds from now, negative in the past."""
    models: dict[str, int] = {}
    resources = [
        {
            "kind": each.kind,
            "owner": each.owner,
            "group": each.group,
            "bookings": [_booking(booking, models) for booking in each.bookings],
        }
        for each in answer.resources
    ]
    return {
        "columns": BOOKING_COLUMNS,
        "models": list(models),
        "resources": resources,
        "truncated": answer.truncated,
    }


def _booking(booking: admin_pb2.Booking, models: dict[str, int]) -> list[object]:
    return [
        str(booking.batch_id),
        models.setdefault(booking.model, len(models)),
        booking.rows,
        booking.booked_start_ns // 1000,
        booking.booked_end_ns // 1000,
        booking.real_start_ns // 1000,
        booking.real_end_ns // 1000,
    ]


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_single(each, field) for each in _items(value)]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _single(value, field)


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else ()


def _single(value: Any, field: Any) -> Any:
    if isinstance(value, Message):
        return values_of(value)
    if field.name in _IDS:
        return str(value)
    # JSON has no NaN and no infinity.
    return value if not isinstance(value, float) or abs(value) < float("inf") else None
