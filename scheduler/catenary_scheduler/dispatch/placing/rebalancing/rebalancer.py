"""Live re-balancing: errors are gathered until several requests are placed together.

A request can be moved as long as its session has not been started, that is among those that one
event or tick places. When there are several (because slots were freed, a plan changed, or a packed
message brought them), their placement is revised once before the sessions start.

Expect little: in simulation it moves ATGT attainment by -0.3 to +1.3 points, which is noise. It is
off unless asked for, costs nothing while the errors have one sign, and leaves large batches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from catenary_scheduler.dispatch.placing.rebalancing.error_lines import WorkerErrors
from catenary_scheduler.dispatch.placing.rebalancing.rebalance import rebalance
from catenary_scheduler.dispatch.placing.rebalancing.rebalance_search import Imbalance
from catenary_services.domain.latency import LatencyLines

W = TypeVar("W", bound=Hashable)
_EXACT_STEPS: Final = 100
"""The number of exact steps is small because this happens between an arrival and its answer."""
_MOST_CHOICES: Final = 256
"""All requests stay where best fit placed them if there are more pairs of request and worker."""


@dataclass(frozen=True, slots=True)
class UnstartedPlacement(Generic[W]):
    """A request that was placed and has not been started."""

    worker: W
    predicted_tokens: float


class Rebalancer(Generic[W]):
    """The errors of the workers of one model since the last re-balance.

    Attributes:
        moved: Requests it has moved since it was made.
    """

    def __init__(self) -> None:
        self.moved = 0
        self._errors: dict[W, WorkerErrors] = {}

    def outgrew(self, worker: W, repredicted_tokens: float) -> None:
        """Adds a session that generated more than predicted. Called once per prediction (R11)."""
        self._of(worker).outgrew(repredicted_tokens)

    def ended_early(self, worker: W, predicted_tokens: float, real_tokens: int) -> None:
        """Adds a session that ended with fewer tokens than predicted."""
        self._of(worker).ended_early(predicted_tokens, real_tokens)

    def forget(self, worker: W) -> None:
        """Drops the errors of a worker that is gone."""
        self._errors.pop(worker, None)

    def settle(
        self,
        lines: Mapping[W, LatencyLines],
        placed: Sequence[UnstartedPlacement[W]],
        fits: Callable[[W, Sequence[int]], bool],
    ) -> dict[int, W]:
        """Returns the placed requests that should run elsewhere, and forgets the errors.

        Args:
            lines: Latency lines of the usable workers; errors of others do not count.
            placed: The requests placed and not yet started; each of their workers has lines.
            fits: True if constraints b-e hold on a worker with these of the placed requests (by
                their indices) beside the sessions it has.

        Returns:
            The new worker by the index in `placed`, of those that move.
        """
        errors, self._errors = self._errors, {}
        signs = {errors[each].sign(lines[each]) for each in errors if each in lines}
        if not placed or not {1, -1} <= signs:
            return {}
        named = [*(each for each in errors if each in lines), *(each.worker for each in placed)]
        workers = list(dict.fromkeys(named))
        if len(workers) * len(placed) > _MOST_CHOICES:
            return {}
        index = {worker: number for number, worker in enumerate(workers)}
        problem = Imbalance(
            lines=[lines[worker] for worker in workers],
            errors=[errors.get(worker) or WorkerErrors() for worker in workers],
            predicted_tokens=[each.predicted_tokens for each in placed],
            placed=[index[each.worker] for each in placed],
            fits=lambda worker, requests: fits(workers[worker], requests),
        )
        done = rebalance(problem, _EXACT_STEPS)
        moves = {
            number: workers[at]
            for number, (at, was) in enumerate(zip(done.assignment, problem.placed, strict=True))
            if at != was
        }
        self.moved += len(moves)
        return moves

    def _of(self, worker: W) -> WorkerErrors:
        errors = self._errors.get(worker)
        if errors is None:
            errors = self._errors[worker] = WorkerErrors()
        return errors
