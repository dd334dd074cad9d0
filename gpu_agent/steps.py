"""What an agent computes now, whichever of its threads does it: since when, and booked for how long.

A thread that computes says so here before each step, so that others can see a step that does not
end: the device driver may never return, and the event loop goes on meanwhile as if all were well.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpu_agent.faults import LOADING, SERVING, Faults
from services.domain.ids import Nanoseconds, PartitionKey

T = TypeVar("T")


class StepKind(enum.Enum):
    """What a step is a step of."""

    BATCH = "batch"
    GENERATION = "generation"
    MEASURING = "measuring"
    LOADING = "loading"


_FAULTS = {
    StepKind.BATCH: SERVING,
    StepKind.GENERATION: SERVING,
    StepKind.LOADING: LOADING,
}


@dataclass(frozen=True, slots=True)
class StepInHand:
    """A step that has begun and not ended."""

    kind: StepKind
    partition: PartitionKey | None
    """None: of none in particular."""
    booked_ns: Nanoseconds
    """How long it was expected to take; 0: nobody knows."""
    began_ns: Nanoseconds


class StepsInHand:
    """The steps of all threads. Any thread may call anything.

    Each operation on the table is one of a dictionary, which the interpreter does whole.
    """

    def __init__(
        self, faults: Faults | None = None, clock: Callable[[], Nanoseconds] = time.monotonic_ns
    ) -> None:
        """Steps are as the `faults` say, if tests want some."""
        self._faults = faults or Faults(None)
        self._clock = clock
        self._numbers = itertools.count()
        self._steps: dict[int, StepInHand] = {}

    def run(
        self,
        work: Callable[[], T],
        kind: StepKind,
        partition: PartitionKey | None = None,
        booked_ns: Nanoseconds = 0,
    ) -> T:
        """Returns what `work` returns; it is in hand until then."""
        number = next(self._numbers)
        self._steps[number] = StepInHand(kind, partition, booked_ns, self._clock())
        try:
            during = _FAULTS.get(kind)
            return work() if during is None else self._faults.run(work, during)
        finally:
            del self._steps[number]

    def in_hand(self) -> list[StepInHand]:
        """Returns what is computed now, the oldest first."""
        return sorted(self._steps.values(), key=lambda step: step.began_ns)
