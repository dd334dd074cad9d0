"""The requests of a run and their states; each request ends exactly once."""

from __future__ import annotations

from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.errors import DeadlineExceeded, InternalError

WAITING, IN_FLIGHT, FINISHED, LATE, DROPPED = range(5)
"""The states of a request, of which the last three are final."""
_NOT_AT_ALL = -1


class SimulatedRequests:
    """All requests of a run, by number, in order of arrival.

    Args:
        models: The models served.
        arrived: Arrival time of each request, ascending.
        model_of: Index of each request's model.
        slos: Time by model from a request's arrival to its deadline.
        texts: Length of each request's one text; None if batches are counted in rows.
    """

    __slots__ = (
        "arrived",
        "deadlines",
        "ended",
        "finished_at",
        "model_of",
        "models",
        "state",
        "texts",
    )

    def __init__(
        self,
        models: list[ModelKey],
        arrived: list[Nanoseconds],
        model_of: list[int],
        slos: list[Nanoseconds],
        texts: list[TextLengths] | None = None,
    ) -> None:
        self.models = models
        self.texts = texts
        self.arrived = arrived
        self.model_of = model_of
        self.deadlines = [
            moment + slos[model] for moment, model in zip(arrived, model_of, strict=True)
        ]
        self.state = bytearray(len(arrived))
        self.finished_at: list[Nanoseconds] = [0] * len(arrived)
        """End of each request; -1 for requests that were answered with an error."""
        self.ended = 0

    def __len__(self) -> int:
        return len(self.arrived)

    def dispatched(self, number: int) -> None:
        """Notes that a request's rows are on their way."""
        if self.state[number] == WAITING:
            self.state[number] = IN_FLIGHT

    def computed(self, number: int, now: Nanoseconds) -> bool:
        """Notes that a request's result is there; returns False if the request had ended before."""
        if self.state[number] > IN_FLIGHT:
            return False
        self._end(number, FINISHED if now <= self.deadlines[number] else LATE)
        self.finished_at[number] = now
        return True

    def rejected(self, number: int, reason: str) -> None:
        """Notes that a request was answered with an error.

        The request is late if its time ran out while it was on its way, and dropped otherwise. If
        its result is there it has ended already, and the dispatcher had not heard of that yet.

        Raises:
            InternalError: The request was rejected before.
        """
        if self.finished_at[number] == _NOT_AT_ALL:
            raise InternalError(f"request {number} was rejected twice")
        state = self.state[number]
        if state <= IN_FLIGHT:
            late = state == IN_FLIGHT and reason == DeadlineExceeded.reason
            self._end(number, LATE if late else DROPPED)
            self.finished_at[number] = _NOT_AT_ALL

    def _end(self, number: int, state: int) -> None:
        self.state[number] = state
        self.ended += 1
