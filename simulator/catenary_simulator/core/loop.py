"""The event heap around a dispatcher of batches, which it runs on a virtual clock."""

from __future__ import annotations

from catenary_scheduler.dispatch.events import (
    CancelBatch,
    Command,
    DispatchBatch,
    Dispatcher,
    Event,
    Reject,
    RequestArrived,
    Tick,
)
from catenary_services.domain.ids import GatewayId, Nanoseconds, RequestId
from catenary_services.errors import InternalError
from catenary_simulator.core.requests import SimulatedRequests
from catenary_simulator.core.world import SimulatedCluster

_GATEWAY = GatewayId("simulated")
_IDLE_TICKS = 1000
_NEVER = 1 << 62


class BatchLoop:
    """A run of a batch workload, which goes on until all requests have ended.

    Args:
        dispatcher: The dispatcher, which has its agents and its plan already.
        world: The cluster that executes the dispatcher's orders.
        requests: The requests, and the state of each.
    """

    __slots__ = ("_dispatcher", "_requests", "_world", "events", "now")

    def __init__(
        self,
        dispatcher: Dispatcher,
        world: SimulatedCluster,
        requests: SimulatedRequests,
    ) -> None:
        self._dispatcher = dispatcher
        self._world = world
        self._requests = requests
        self.now: Nanoseconds = 0
        self.events = 0
        """Number of arrivals and wake-ups; `world` counts its own events."""

    def run(self) -> None:
        """Runs until every request has ended and nothing is on its way.

        Raises:
            InternalError: Requests are left that nothing will ever end.
        """
        arrived, world, requests = self._requests.arrived, self._world, self._requests
        count = len(arrived)
        heap = world.heap
        reports = world.reports
        idle = 0
        wake = self._wakeup()
        while True:
            arrival = arrived[requests.at] if requests.at < count else _NEVER
            happens = heap[0][0] if heap else _NEVER
            if happens <= arrival and happens <= wake and happens != _NEVER:
                self.now = happens
                world.step()
                if reports:
                    for event in reports:
                        self._tell(event)
                    reports.clear()
                    wake = self._wakeup()
            elif arrival <= wake and arrival != _NEVER:
                self.now = arrival
                self._arrive(requests.at)
                requests.at += 1
                wake = self._wakeup()
            elif requests.ended == count and not heap:
                return
            elif wake == _NEVER:
                raise InternalError(f"{count - requests.ended} requests are never answered")
            else:
                idle = idle + 1 if wake <= self.now else 0
                if idle > _IDLE_TICKS:
                    raise InternalError(f"the dispatcher wants to be woken at {wake} again")
                self.now = max(self.now, wake)
                self.events += 1
                self._tell(Tick())
                wake = self._wakeup()

    def _wakeup(self) -> Nanoseconds:
        moment = self._dispatcher.next_wakeup()
        return _NEVER if moment is None else moment

    def _arrive(self, number: int) -> None:
        requests = self._requests
        self.events += 1
        self._tell(
            RequestArrived(
                RequestId(_GATEWAY, number),
                requests.models[requests.model_of[number]],
                1,
                requests.deadlines[number],
            )
        )

    def _tell(self, event: Event) -> None:
        self._carry_out(self._dispatcher.handle(event, self.now))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, DispatchBatch):
                self._world.dispatch(command, self.now)
            elif isinstance(command, Reject):
                self._requests.rejected(command.request.number, command.reason)
            elif isinstance(command, CancelBatch):
                self._world.cancel(command)
