"""The memory of messages that are still arriving: room is asked for before they are let in.

A caller may send a first window. For more of a message its whole length is reserved, of what all
may hold and of what its source may. Where there is no room the caller waits, which costs nothing;
its source has a bounded share of the queue. A message that arrives too slowly is given up, and so
is what the largest holder holds if it keeps others waiting.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from catenary_services.errors import CatenaryError, DeadlineExceeded, Overloaded
from catenary_services.log import get_logger
from catenary_services.memory import give_back_soon

MAX_RECEIVING_BYTES = 128 * 1024 * 1024
"""Bytes of all messages that are arriving at one port, where nothing else is set."""
MOST_OF_ONE_SOURCE = 32 * 1024 * 1024
"""Bytes of unfinished messages that one source may hold at a port for clients. One message of any
accepted size is always allowed."""
SILENCE_S = 10.0
"""A message of which no byte comes for so long is given up."""
LONGEST_S = 60.0
"""The longest time that one message may take."""
_STARVED_S = 1.0
"""Seconds that a message may wait for room because of others, before the largest holder is cut."""
_MOST_WAITING = 4
"""The number of times that a source may have waiting what it may hold."""
_LONGEST_QUEUE = 2_048
_RETRY_NS = 1_000_000_000

_log = get_logger("catenary_services.grpc")


class MessageOwner(Protocol):
    """The call to which a message belongs."""

    def on_room(self) -> None:
        """Learns that there is room for the message."""
        ...

    def give_up(self, error: CatenaryError) -> None:
        """Ends with an error."""
        ...


class ArrivingMessage:
    """A message of which a part is there.

    Attributes:
        owner: Its call.
        source: Who is charged for it: the name of a key, or an address.
        nbytes: Its whole length.
        has_room: Whether room is reserved for it.
        since_s: When the waiting began.
        moved_s: When the last bytes came, or when it got room.
    """

    __slots__ = ("has_room", "moved_s", "nbytes", "owner", "since_s", "source")

    def __init__(self, owner: MessageOwner, source: str, nbytes: int, now_s: float) -> None:
        self.owner = owner
        self.source = source
        self.nbytes = nbytes
        self.has_room = False
        self.since_s = self.moved_s = now_s


class ReceivingBudget:
    """The room for messages that are arriving at one server.

    Attributes:
        held: Bytes that are reserved.
        silence_s: A message of which no byte comes for so long is given up.
    """

    def __init__(
        self, most_bytes: int, silence_s: float = SILENCE_S, most_of_one: int | None = None
    ) -> None:
        """Bounds the bytes of messages that are not complete yet.

        Args:
            most_bytes: Bound of all together.
            silence_s: A message of which no byte comes for so long is given up.
            most_of_one: Bound of one source; None for half of all. One message is always allowed.
        """
        self._most_bytes = most_bytes
        self._most_of_one = most_bytes // 2 if most_of_one is None else most_of_one
        self.silence_s = silence_s
        self._arriving: dict[ArrivingMessage, None] = {}
        self._waiting: dict[ArrivingMessage, None] = {}
        self._held_by: Counter[str] = Counter()
        self._waiting_of: Counter[str] = Counter()
        self.held = 0

    def enter(self, message: ArrivingMessage) -> None:
        """Reserves room for a message whose length is known, or has it wait for room.

        Raises:
            Overloaded: Too much of its source waits already.
        """
        self._arriving[message] = None
        if self._fits(message) and not self._is_behind(message):
            self._reserve(message)
            return
        source, nbytes = message.source, message.nbytes
        share = _MOST_WAITING * max(self._most_of_one, nbytes)
        if self._waiting_of[source] + nbytes > share or len(self._waiting) >= _LONGEST_QUEUE:
            self._arriving.pop(message)
            raise Overloaded("too much of unfinished messages is held", retry_after_ns=_RETRY_NS)
        self._waiting[message] = None
        self._waiting_of[source] += nbytes

    def leave(self, message: ArrivingMessage) -> None:
        """Forgets a message, which is complete or given up."""
        self._arriving.pop(message, None)
        if message.has_room:
            message.has_room = False
            self._count(self._held_by, message.source, -message.nbytes)
            self.held -= message.nbytes
        elif message in self._waiting:
            del self._waiting[message]
            self._count(self._waiting_of, message.source, -message.nbytes)
        if self._waiting:
            self._admit()

    def look(self, now_s: float) -> None:
        """Gives up messages that are too slow, and whoever holds most if others starve."""
        for message in list(self._arriving):
            silent = now_s - message.moved_s > self.silence_s and message not in self._waiting
            if silent or now_s - message.since_s > LONGEST_S:
                why = "the message did not arrive in time"
                message.owner.give_up(DeadlineExceeded(why, details={"stage": "arrival"}))
        for message in self._waiting:
            if now_s - message.since_s > _STARVED_S and self._starved_by_others(message):
                self._cut_largest(message.source)
                return

    def _fits(self, message: ArrivingMessage) -> bool:
        own, nbytes = self._held_by[message.source], message.nbytes
        has_share = own == 0 or own + nbytes <= self._most_of_one
        return has_share and (self.held == 0 or self.held + nbytes <= self._most_bytes)

    def _is_behind(self, message: ArrivingMessage) -> bool:
        """True if others wait for the same room."""
        return bool(self._waiting) and (
            self._waiting_of[message.source] > 0
            or any(self._held_by[each.source] == 0 for each in self._waiting)
        )

    def _reserve(self, message: ArrivingMessage) -> None:
        message.has_room = True
        self._held_by[message.source] += message.nbytes
        self.held += message.nbytes

    def _admit(self) -> None:
        """Gives room to those that wait, in their order; the share of one keeps no other back."""
        for message in list(self._waiting):
            own = self._held_by[message.source]
            if self.held and self.held + message.nbytes > self._most_bytes:
                return
            if own and own + message.nbytes > self._most_of_one:
                continue
            del self._waiting[message]
            self._count(self._waiting_of, message.source, -message.nbytes)
            self._reserve(message)
            message.owner.on_room()

    def _starved_by_others(self, message: ArrivingMessage) -> bool:
        own = self._held_by[message.source]
        if own and own + message.nbytes > self._most_of_one:
            return False
        return own < max(self._held_by.values(), default=0)

    def _cut_largest(self, but: str) -> None:
        largest = max(self._held_by, key=lambda source: self._held_by[source])
        if largest == but:
            return
        cut = [each for each in self._arriving if each.source == largest and each.has_room]
        _log.warning(
            "messages_cut_off", source=largest, bytes=self._held_by[largest], count=len(cut)
        )
        why = "too much of unfinished messages is held"
        for message in cut:
            message.owner.give_up(Overloaded(why, retry_after_ns=_RETRY_NS))
        give_back_soon()

    def _count(self, counter: Counter[str], source: str, change: int) -> None:
        counter[source] += change
        if not counter[source]:
            del counter[source]
