"""Counts of the bad messages of each sender, and how long the sender is ignored for them. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

ALLOWED = 3
"""The number of offences within `WINDOW_NS` that begins a hold."""
WINDOW_NS = 60 * NANOSECONDS_PER_SECOND
FIRST_HOLD_NS = 10 * NANOSECONDS_PER_SECOND
LONGEST_HOLD_NS = 3_600 * NANOSECONDS_PER_SECOND
"""The longest hold. Each hold is twice as long as the one before; after so long without an offence
the first one is short again."""
_MOST_KNOWN = 4_096


@dataclass(slots=True)
class _Record:
    times: deque[Nanoseconds] = field(default_factory=lambda: deque(maxlen=ALLOWED))
    last: Nanoseconds = 0
    hold_ns: Nanoseconds = 0
    until: Nanoseconds = 0


class OffenceLog:
    """Offences by the name of the sender; senders heard of first are forgotten first."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def add(self, name: str, now: Nanoseconds) -> Nanoseconds:
        """Notes an offence.

        Returns:
            The end of the hold that this offence begins; 0 if it begins none.
        """
        record = self._records.pop(name, None)
        if record is None or now - max(record.last, record.until) > LONGEST_HOLD_NS:
            record = _Record()
        self._records[name] = record
        if len(self._records) > _MOST_KNOWN:
            del self._records[next(iter(self._records))]
        record.last = now
        record.times.append(now)
        if len(record.times) < ALLOWED or now - record.times[0] > WINDOW_NS:
            return 0
        record.hold_ns = min(LONGEST_HOLD_NS, 2 * record.hold_ns or FIRST_HOLD_NS)
        record.until = max(record.until, now + record.hold_ns)
        record.times.clear()
        return record.until

    def held_ns(self, name: str, now: Nanoseconds) -> Nanoseconds:
        """Returns the nanoseconds that a sender is still ignored for; 0 if it is not."""
        record = self._records.get(name)
        return max(0, record.until - now) if record is not None else 0
