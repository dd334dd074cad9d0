"""Limits on what peers cost: one while nothing gets done, and all in a turn of the event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from catenary_services.http2.frames import ENHANCE_YOUR_CALM, ConnectionViolation
from catenary_services.http2.limits import (
    FLOOD_BURST,
    FLOOD_PER_S,
    FRAMES_PER_WORK,
    WORK_AT_ONCE,
)

T = TypeVar("T")


class FloodLimit:
    """The bucket of one connection; it starts full.

    Attributes:
        now_s: The time; whoever feeds the connection keeps it.
    """

    __slots__ = ("_left", "_since_s", "now_s")

    def __init__(self, now_s: float) -> None:
        self._left = FLOOD_BURST
        self._since_s = self.now_s = now_s

    def spend(self, cost: int) -> None:
        """Takes `cost` out of the bucket.

        Raises:
            ConnectionViolation: There is not so much in it.
        """
        self._left -= cost
        if self._left < 0:
            self.restore(int((self.now_s - self._since_s) * FLOOD_PER_S))
            self._since_s = self.now_s
            if self._left < 0:
                raise ConnectionViolation(ENHANCE_YOUR_CALM, "too many frames move nothing")

    def restore(self, amount: int) -> None:
        """Puts something back."""
        self._left = min(FLOOD_BURST, self._left + amount)


class TurnBudget:
    """The work of reading that all connections of a server may still do in this turn of the loop.

    Attributes:
        is_spent: Whether what can wait waits for the next turn.
    """

    __slots__ = ("_at_next_turn", "_left", "is_spent")

    def __init__(self, at_next_turn: Callable[[Callable[[], None]], object]) -> None:
        """Creates a whole budget.

        Args:
            at_next_turn: Has a function called when the next turn begins.
        """
        self._at_next_turn = at_next_turn
        self._left = WORK_AT_ONCE
        self.is_spent = False

    def spend(self, work: int) -> None:
        """Takes work that was done, counted in short blocks of headers, out of the budget."""
        if self._left == WORK_AT_ONCE:
            self._at_next_turn(self._renew)
        self._left -= work
        self.is_spent = self._left <= 0

    def spend_frames(self, frames: int) -> None:
        """Takes the work of frames, whatever they were, out of the budget; few cost nothing."""
        if frames >= FRAMES_PER_WORK:
            self.spend(frames // FRAMES_PER_WORK)

    def _renew(self) -> None:
        self._left = WORK_AT_ONCE
        self.is_spent = False


class TurnQueue(Generic[T]):
    """The connections that wait to be read: sources take turns, those of one in their order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, source: str, connection: T) -> None:
        """Has a connection of a source wait, unless it does."""
        self._waiting.setdefault(source, OrderedDict())[connection] = None

    def drop(self, source: str, connection: T) -> None:
        """Has a connection of a source wait no longer, if it does."""
        connections = self._waiting.get(source)
        if connections is not None and connection in connections:
            del connections[connection]
            if not connections:
                del self._waiting[source]

    def take(self) -> T:
        """Returns the connection whose turn it is, which waits no longer."""
        source, connections = self._waiting.popitem(last=False)
        connection, _ = connections.popitem(last=False)
        if connections:
            self._waiting[source] = connections
        return connection
