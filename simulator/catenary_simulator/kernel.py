"""The event kernel: the virtual clock that drives every kind of simulation.

Three things happen in virtual time: what is due (entries of a heap), requests that arrive, and
wake-ups for which the dispatcher asked. At one moment what is due goes first, by the order its
entries state and then as they were entered; then arrivals; then the wake-up. The kernel draws no
random numbers: whoever does has a generator of its own, made from a seed that is an argument.

A kind of simulation is a subclass: what arrives, what becomes of an entry that is due, how commands
of the dispatcher are carried out, and when all is over. Plainly typed and without closures, so that
it can be compiled together with the dispatcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from catenary_scheduler.dispatch.events import Command, Dispatcher, Event, Tick
from catenary_services.domain.ids import GatewayId, Nanoseconds
from catenary_services.errors import InternalError

GATEWAY = GatewayId("simulated")
NEVER: Nanoseconds = 1 << 60
"""Time in nanoseconds beyond the end of any simulation: a deadline that does not bind, a wake-up
that need not come."""
_SWEPT = 1024
"""Number of arrivals between two sweeps."""
_MOST_IDLE = 10_000
"""Number of wake-ups and periodic entries in a row after which a simulation is taken to be
stuck."""


class Kernel(ABC):
    """The virtual clock of a simulation, which handles events in the order of their times.

    Args:
        dispatcher: The dispatcher, with its agents and its plan; None: nobody is told anything.
        arrivals_ns: Arrival time of each request, ascending.
        ticks: Number of ticks of the clock in a nanosecond.
        periodic_from: Entries of this order or a later one come again and again, whatever happens;
            a simulation in which nothing else happens any more is stuck.

    Attributes:
        now: The virtual time, in ticks.
        told: Number of events that the dispatcher has handled.
        arrived: Number of requests that have arrived.
        sweep: Called every 1024 arrivals, to drop records that a dispatcher keeps for others; None:
            nothing is called.
    """

    __slots__ = (
        "_arrivals_ns",
        "_dispatcher",
        "_events",
        "_heap",
        "_is_stopped",
        "_periodic_from",
        "_sequence",
        "_ticks",
        "arrived",
        "now",
        "sweep",
        "told",
    )

    def __init__(
        self,
        dispatcher: Dispatcher | None,
        arrivals_ns: Sequence[Nanoseconds],
        ticks: int = 1,
        periodic_from: int = NEVER,
    ) -> None:
        self.now = 0
        self.told = 0
        self.arrived = 0
        self._dispatcher = dispatcher
        self._arrivals_ns = arrivals_ns
        self._ticks = ticks
        self.sweep: Callable[[], object] | None = None
        self._periodic_from = periodic_from
        self._heap: list[tuple[int, int, int, object]] = []
        """Entries that are due, as (time in ticks, order within the same tick, sequence number,
        content)."""
        self._sequence = 0
        self._is_stopped = False
        self._events: list[Event] = []
        """Events that the dispatcher is told of once the present entry is handled."""

    # The methods that a kind of simulation has

    @abstractmethod
    def arrive(self, number: int) -> None:
        """Handles the arrival of the request with this number, counted from 0."""

    @abstractmethod
    def happen(self, order: int, what: object) -> None:
        """Handles an entry that is due now."""

    @abstractmethod
    def carry_out(self, commands: list[Command]) -> None:
        """Executes the dispatcher's commands."""

    @abstractmethod
    def unanswered(self) -> int:
        """Returns the number of requests that have arrived and are not answered yet."""

    @abstractmethod
    def is_over(self) -> bool:
        """Returns whether the simulation ends; asked once all requests have arrived."""

    # The methods that a kind of simulation calls

    def at(self, moment: int, order: int, what: object) -> None:
        """Enters what is due at a time, in ticks; within one tick the least order comes first."""
        self._sequence += 1
        heappush(self._heap, (moment, order, self._sequence, what))

    def tell(self, event: Event) -> None:
        """Queues an event for the dispatcher, which handles it after the present entry."""
        self._events.append(event)

    def now_ns(self) -> Nanoseconds:
        """Returns the virtual time, rounded up to a whole nanosecond."""
        return -(-self.now // self._ticks)

    def has_arrivals(self) -> bool:
        """Returns whether there are requests that have yet to arrive."""
        return self.arrived < len(self._arrivals_ns)

    def is_empty(self) -> bool:
        """Returns whether no entry is due any more."""
        return not self._heap

    def stop(self) -> None:
        """Ends the simulation early, because its outcome is known."""
        self._is_stopped = True

    def run(self) -> None:
        """Handles entries, arrivals and wake-ups in turn, until the simulation is over or stopped.

        Raises:
            InternalError: Requests are left that nothing will ever answer.
        """
        heap, events, ticks = self._heap, self._events, self._ticks
        arrivals, count, never = self._arrivals_ns, len(self._arrivals_ns), NEVER * self._ticks
        arrival = arrivals[0] * ticks if count else never
        wake, idle = self._wakeup(), 0
        while not self._is_stopped:
            if arrival >= never and self.is_over():
                return
            due = heap[0][0] if heap else never
            if due <= arrival and due <= wake:
                if due >= never:
                    raise InternalError(f"{self.unanswered()} requests are never answered")
                entry = heappop(heap)
                self.now = due
                idle = idle + 1 if entry[1] >= self._periodic_from else 0
                self.happen(entry[1], entry[3])
            elif arrival <= wake:
                self.now = arrival
                idle = 0
                number = self.arrived
                if self.sweep is not None and number % _SWEPT == 0:
                    self.sweep()
                self.arrived = number + 1
                self.arrive(number)
                arrival = arrivals[number + 1] * ticks if number + 1 < count else never
            else:
                self.now = max(self.now, wake)
                idle += 1
                events.append(Tick())
            if events:
                wake = self._tell()
            if idle > _MOST_IDLE:
                raise InternalError(f"{self.unanswered()} requests wait and nothing happens")

    def _tell(self) -> int:
        """Has the dispatcher handle the queued events; returns its next wake-up, in ticks."""
        dispatcher, events = self._dispatcher, self._events
        assert dispatcher is not None  # without a dispatcher, no event is queued
        now = self.now if self._ticks == 1 else self.now_ns()
        for event in events:  # includes events that are queued meanwhile, behind these
            commands = dispatcher.handle(event, now)
            if commands:
                self.carry_out(commands)
        self.told += len(events)
        events.clear()
        return self._wakeup()

    def _wakeup(self) -> int:
        moment = None if self._dispatcher is None else self._dispatcher.next_wakeup()
        return (NEVER if moment is None or moment > NEVER else moment) * self._ticks
