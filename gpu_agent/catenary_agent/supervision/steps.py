"""What an agent computes now, on whichever of its threads: since when, and booked for how long.

A thread that computes says so here before each step, so that others can see a step that does not
end: the device driver may never return, and the event loop goes on meanwhile as if all were well.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from catenary_agent.devices.device_errors import Trouble, trouble_of
from catenary_agent.supervision.faults import LOADING, SERVING, Faults
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import Nanoseconds, PartitionKey

T = TypeVar("T")


class StepKind(enum.Enum):
    """What a step is a step of."""

    BATCH = "batch"
    GENERATION = "generation"
    MEASURING = "measuring"
    LOADING = "loading"


_KINDS = {
    StepKind.BATCH: scheduler_pb2.STEP_KIND_BATCH,
    StepKind.GENERATION: scheduler_pb2.STEP_KIND_GENERATION,
    StepKind.MEASURING: scheduler_pb2.STEP_KIND_MEASURING,
    StepKind.LOADING: scheduler_pb2.STEP_KIND_LOADING,
}
_FAULTS = {
    StepKind.BATCH: SERVING,
    StepKind.GENERATION: SERVING,
    StepKind.LOADING: LOADING,
}


class StepInHand(NamedTuple):
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
        self.lost: Callable[[BaseException], None] = lambda error: None
        """Told, on the thread that computes, what has lost the device to this process."""
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
        except Exception as error:
            if trouble_of(error) is Trouble.STICKY:
                self.lost(error)
            raise
        finally:
            del self._steps[number]

    def in_hand(self) -> list[StepInHand]:
        """Returns what is computed now, the oldest first."""
        return sorted(self._steps.values(), key=lambda step: step.began_ns)

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """Returns what the scheduler is told of them."""
        now = self._clock()
        beat = scheduler_pb2.Heartbeat()
        for step in self.in_hand():
            told = beat.steps.add(
                kind=_KINDS[step.kind], age_ns=max(0, now - step.began_ns), booked_ns=step.booked_ns
            )
            if step.partition is not None:
                told.partition.model = step.partition.model.name
                told.partition.model_version = step.partition.model.version
                told.partition.first_block = step.partition.first_block
                told.partition.last_block = step.partition.last_block
        return beat
