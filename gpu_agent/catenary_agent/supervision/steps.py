"""The steps that an agent's threads compute now: since when, and for how long they were booked.

A thread registers each step here before computing it, so that others can see a step that does not
end: the device driver may never return, while the event loop runs on as if all were well.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_agent.supervision.faults import LOADING, SERVING, FaultInjector
from catenary_agent.supervision.turns import DeviceTurns
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import Nanoseconds, PartitionKey

T = TypeVar("T")


class StepKind(enum.Enum):
    """The kind of work that a step is part of."""

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


class RunningStep(NamedTuple):
    """A step that has begun and not ended."""

    kind: StepKind
    partition: PartitionKey | None
    """The partition; None if the step belongs to none in particular."""
    booked_ns: Nanoseconds
    """The expected duration; 0 if it is unknown."""
    began_ns: Nanoseconds


class RunningSteps:
    """The running steps of all threads; any thread may call any method.

    Each access to the table is a single dictionary operation, which the interpreter executes
    atomically.

    Attributes:
        turns: What a thread holds while it computes on the device. A step is registered when its
            turn has come, so that waiting for a turn never looks like a step that does not end.
    """

    def __init__(
        self,
        faults: FaultInjector | None = None,
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        """Begins without steps; `faults` lets tests disturb them."""
        self.turns = DeviceTurns()
        self._faults = faults if faults is not None and faults.is_armed else None
        self._clock = clock
        self.lost: Callable[[BaseException], None] = lambda error: None
        """Called on the computing thread with the error that lost the device to this process."""
        self._numbers = itertools.count()
        self._mine = threading.local()
        self._steps: dict[int, RunningStep] = {}

    def run(
        self,
        work: Callable[[], T],
        kind: StepKind,
        partition: PartitionKey | None = None,
        booked_ns: Nanoseconds = 0,
    ) -> T:
        """Returns the result of `work`, which counts as a running step until then."""
        number = self._mine.number = self.begin(kind, partition, booked_ns)
        try:
            if self._faults is None or (during := _FAULTS.get(kind)) is None:
                return work()
            return self._faults.run(work, during)
        except Exception as error:
            if error_kind_of(error) is DeviceErrorKind.STICKY:
                self.lost(error)
            raise
        finally:
            self.end(number)

    def begin(
        self, kind: StepKind, partition: PartitionKey | None = None, booked_ns: Nanoseconds = 0
    ) -> int:
        """Registers a step that runs outside this process, until `end` is given its number."""
        number = next(self._numbers)
        self._steps[number] = RunningStep(kind, partition, booked_ns, self._clock())
        return number

    def end(self, number: int) -> None:
        """Notes that a step has ended."""
        del self._steps[number]

    def renew(self) -> None:
        """Counts the calling thread's step as begun now: what it waits for makes progress."""
        number = getattr(self._mine, "number", -1)
        step = self._steps.get(number)
        if step is not None:
            self._steps[number] = step._replace(began_ns=self._clock())

    def in_hand(self) -> list[RunningStep]:
        """Returns the running steps, the oldest first."""
        return sorted(self._steps.values(), key=lambda step: step.began_ns)

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """Returns the heartbeat that reports the running steps to the scheduler."""
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
