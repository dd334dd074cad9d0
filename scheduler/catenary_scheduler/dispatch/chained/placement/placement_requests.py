"""Needs of requests towards a worker, in the form that decisions take."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.placement.workers import ChainWorkers
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.best_fit import PlacementRequest, last_moment
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.latency import TokenObjectives

_LONGEST_HOLD_NS = NANOSECONDS_PER_SECOND
"""A request without an objective for its first token is held back for this long at most."""
_NO_OBJECTIVES = TokenObjectives()


class PlacementRequests:
    """Makes placement requests of one model.

    Attributes:
        objectives: The objectives of the model's plan; None if it has none.
        lengths: Predicts answers.
    """

    def __init__(self, workers: ChainWorkers) -> None:
        self.objectives: TokenObjectives | None = None
        self.lengths = LengthPredictor()
        self._workers = workers

    def objectives_of(self, event: SessionRequested) -> TokenObjectives | None:
        """Returns the objectives of a request; None if it has none."""
        found = event.objectives or self.objectives
        if found is None or not (found.first_token_ns or found.per_token_ns):
            return None
        return found

    def request_of(
        self, event: SessionRequested, arrived: Nanoseconds, done: int = 0
    ) -> PlacementRequest:
        """Returns a request in the form that decisions take.

        Args:
            event: The request.
            arrived: Moment at which its gateway got it.
            done: Tokens of its answer that it has already; after a lost session they are run again
                as part of its prompt.
        """
        objectives = self.objectives_of(event) or _NO_OBJECTIVES
        if done:
            whole = self.lengths.repredict(event.prompt_tokens, done, event.max_tokens)
        else:
            whole = self.lengths.predict(event.prompt_tokens, event.max_tokens)
        first = objectives.first_token_ns
        due = 0
        if not done and first:
            due = arrived + first
        elif not done and objectives.per_token_ns:
            due = arrived + _LONGEST_HOLD_NS
        return PlacementRequest(
            event.prompt_tokens + done, max(1.0, whole - done), first, due, objectives.per_token_ns
        )

    def prepare(self, sequence: SequenceRequest) -> PlacementRequest:
        """Computes what a request needs, and when it must be placed at the latest."""
        placement_request = self.request_of(
            sequence.event, sequence.arrived, sequence.generated_tokens
        )
        sequence.placement_request = placement_request
        sequence.must_start = 0
        if placement_request.due_ns:
            sequence.must_start = min(
                [last_moment(placement_request, each) for each in self._workers.kinds], default=0
            )
        return placement_request
