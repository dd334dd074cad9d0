"""A feeder that keeps the compute thread busy with the most urgent batch, and not further ahead."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.devices.device_errors import failure
from catenary_agent.engine.batch import Batch, StagedOutput
from catenary_agent.supervision.steps import StepKind
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import (
    CatenaryError,
    ClientError,
    DeadlineExceeded,
    InternalError,
    OverloadError,
)
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from collections import deque

    from catenary_agent.engine.batch import Array
    from catenary_agent.engine.computing.compute import ComputeThread
    from catenary_agent.supervision.steps import RunningSteps

_log = get_logger("catenary_agent.engine")

_AHEAD = 2
"""The most jobs at the thread: one that runs, and one to be started next without a delay."""
_MOST_IN_A_ROW = 16
"""The most short batches that are computed on the event loop before it gets to other work."""
_REMEMBERED = 256
"""Number of batches of which the feeder knows that they were computed."""
_BATCHES_PER_STEP = 8
"""While batches are always ready, one other job is computed after this many of them."""


@dataclass(slots=True, eq=False)
class ComputeJob:
    """A short job other than a batch for the compute thread, e.g. one measurement."""

    work: Callable[[], int]
    done: asyncio.Future[int]
    result: int = 0
    error: Exception | None = None


Job = Batch | ComputeJob


class ReadyQueue:
    """A heap by start of reservation; batches with equal starts keep their order of arrival.

    Cancelled batches are dropped when they come to the top. The bytes the engine may hold bound its
    length: every batch in it owns at least one received frame.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Batch]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return sum(not batch.cancelled for _, _, batch in self._heap)

    def batches(self) -> list[Batch]:
        """Returns the queued batches in no particular order."""
        return [batch for _, _, batch in self._heap if not batch.cancelled]

    def push(self, batch: Batch) -> None:
        heapq.heappush(self._heap, (batch.reserved_start_ns, next(self._arrivals), batch))

    def peek(self) -> Batch | None:
        """Returns the batch that `pop` would return; None if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Batch | None:
        """Removes and returns the batch with the earliest reservation; None if there is none."""
        batch = self.peek()
        if batch is not None:
            heapq.heappop(self._heap)
        return batch


class Feeder:
    """Chooses the job that is computed next.

    A batch whose window is not open yet waits, unless the batch that is booked ahead of it has been
    computed: the device is kept free for that one.

    It has no task: whatever makes room at the thread or needs it feeds the thread at once. A short
    batch is computed at once, on the event loop, if the thread has nothing to do: the two wake-ups
    that the thread costs are more than the batch.

    Invariants: at most `_AHEAD` jobs are at the thread. A batch waits at the thread only while no
    more urgent one is ready. While `max_unpushed` results wait for their links, at most one more is
    computed.
    """

    def __init__(
        self,
        stage: Callable[[Batch], StagedOutput | None],
        failed: Callable[[Batch, CatenaryError], None],
        max_unpushed: int,
        steps: deque[ComputeJob],
    ) -> None:
        """Stages outputs with `stage`, and fails batches whose deadline passed with `failed`."""
        self._stage = stage
        self._failed = failed
        self._max_unpushed = max_unpushed
        self._steps = steps
        self._ready = ReadyQueue()
        self._thread: ComputeThread[Job] | None = None
        self._inside: list[Job] = []
        self._unpushed = 0
        self._since_step = 0
        self._crashed: asyncio.Future[None] | None = None
        self._is_feeding = False
        self._in_a_row = 0
        self._alarm: asyncio.TimerHandle | None = None
        """Feeds the thread when the window of the most urgent batch opens."""
        self._past: OrderedDict[int, None] = OrderedDict()
        """The last batches that were computed or cancelled."""
        self.begins: Callable[[Batch], None] = _nothing
        """Called when the thread is about to begin a batch."""
        self.compute_here: Callable[[Batch], bool] | None = None
        """Computes and delivers a batch on the event loop; returns False if the device is taken.
        None if everything is computed on the thread."""

    def __len__(self) -> int:
        return len(self._ready)

    def start(self, thread: ComputeThread[Job]) -> asyncio.Future[None]:
        """Feeds `thread` from now on.

        Returns:
            A future that ends when feeding fails, with the exception, which is a bug.
        """
        self._thread = thread
        self._crashed = asyncio.get_running_loop().create_future()
        return self._crashed

    def close(self) -> None:
        """Forgets all jobs that are not at the thread."""
        self._silence()
        self._ready = ReadyQueue()
        self._steps.clear()

    def add(self, batch: Batch) -> None:
        """Queues a complete batch; it may overtake less urgent ones that have not begun."""
        self._ready.push(batch)
        if len(self._inside) == _AHEAD:
            waiting = self._inside[-1]
            if isinstance(waiting, Batch) and batch.reserved_start_ns < waiting.reserved_start_ns:
                self._take_back(waiting)
        self._feed()

    def add_step(self, step: ComputeJob) -> None:
        """Queues another job, which is computed when no batch is ready or after a few batches."""
        self._steps.append(step)
        self._feed()

    def withdraw(self, batch: Batch) -> bool:
        """Removes a cancelled batch; returns False if the thread has begun to compute it."""
        if batch in self._inside:
            assert self._thread is not None
            if not self._thread.take_back(batch):
                return False
            self._inside.remove(batch)
            self._feed()
        return True

    def finished(self, job: Job) -> None:
        self._inside.remove(job)
        if isinstance(job, Batch):
            self._unpushed += 1
            self._pass(job.batch_id)
        if self._inside:
            self._begin(self._inside[0])
        self._feed()

    def passed(self, batch_id: int) -> None:
        """Notes that a batch will not be computed here any more."""
        self._pass(batch_id)
        self._feed()

    def pushed(self) -> None:
        """Notes that a finished batch has left."""
        self._unpushed -= 1
        self._feed()

    def _feed(self) -> None:
        """Hands jobs to the thread while it has room for them."""
        if self._is_feeding or self._in_a_row >= _MOST_IN_A_ROW:
            return  # it goes on when the batch that is computed here has left, or in the next turn
        self._is_feeding = True
        try:
            while (
                len(self._inside) < _AHEAD
                and self._unpushed + len(self._inside) <= self._max_unpushed
                and self._in_a_row < _MOST_IN_A_ROW
            ):
                job = self._choose()
                if job is None:
                    return
                if isinstance(job, Batch):
                    self._prepare(job)
                else:
                    self._offer(job)
        except Exception as error:
            # Whoever made room is not to blame; the process ends for it (`BatchEngine.failed`).
            if self._crashed is not None and not self._crashed.done():
                self._crashed.set_exception(error)
        finally:
            self._is_feeding = False

    def _choose(self) -> Job | None:
        """Removes and returns the job that is next; None if there is none for the thread now."""
        if not self._steps or self._since_step < _BATCHES_PER_STEP:
            batch = self._ready.peek()
            if batch is not None and not self._must_wait(batch):
                if self._inside and self._is_for_here(batch):
                    return None  # it is computed here when the thread is done
                return self._ready.pop()
        if not self._steps:
            return None
        self._since_step = 0
        return self._steps.popleft()

    def _must_wait(self, batch: Batch) -> bool:
        """Returns whether the device is kept free for another batch, and looks again in time."""
        left_ns = batch.earliest_ns - time.monotonic_ns() if batch.earliest_ns else 0
        if left_ns <= 0 or self._is_past(batch.hop.behind_batch_id):
            return False
        self._silence()
        self._alarm = asyncio.get_running_loop().call_later(
            left_ns / NANOSECONDS_PER_SECOND, self._feed
        )
        return True

    def _is_past(self, batch_id: int) -> bool:
        """Returns whether a batch has been computed, or is before whatever comes to the thread."""
        if batch_id in self._past:
            return True
        return any(isinstance(job, Batch) and job.batch_id == batch_id for job in self._inside)

    def _pass(self, batch_id: int) -> None:
        self._past[batch_id] = None
        if len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _begin(self, job: Job) -> None:
        if isinstance(job, Batch):
            self.begins(job)

    def _prepare(self, batch: Batch) -> None:
        """Stages the outputs of the most urgent batch and hands it to the thread."""
        if batch.deadline_ns <= time.monotonic_ns():
            self._failed(batch, out_of_time())
            return
        batch.staged = self._stage(batch)
        self._since_step += 1
        if not self._computed_here(batch):
            self._offer(batch)

    def _is_for_here(self, batch: Batch) -> bool:
        return self.compute_here is not None and batch.partition.is_short(batch.rows)

    def _computed_here(self, batch: Batch) -> bool:
        """Computes a short batch on the event loop; returns False if the thread has to do it."""
        if self._inside or not self._is_for_here(batch):
            return False
        assert self.compute_here is not None
        self._inside.append(batch)
        if not self.compute_here(batch):
            self._inside.remove(batch)
            return False
        self._in_a_row += 1
        if self._in_a_row == _MOST_IN_A_ROW:
            asyncio.get_running_loop().call_soon(self._has_turned)
        return True

    def _has_turned(self) -> None:
        self._in_a_row = 0
        self._feed()

    def _offer(self, job: Job) -> None:
        assert self._thread is not None
        self._inside.append(job)
        self._thread.offer(job)
        if len(self._inside) == 1:
            self._begin(job)

    def _take_back(self, batch: Batch) -> None:
        assert self._thread is not None
        if self._thread.take_back(batch):
            self._inside.remove(batch)
            unstage(batch)
            self._ready.push(batch)


def _nothing(_: Batch) -> None:
    """Default for callbacks that have nothing to do."""


def unstage(batch: Batch) -> None:
    """Releases the staged memory of a batch that will not use it."""
    if batch.staged is not None:
        batch.staged.release()
        batch.staged = None


def out_of_time() -> DeadlineExceeded:
    """Returns the error of a batch that waited for the device for too long."""
    return DeadlineExceeded(
        "the deadline passed before the device was free", details={"stage": "wait"}
    )


def run_job(job: Job, steps: RunningSteps) -> None:
    """Runs a job on the compute thread in its turn; an exception is stored in the job."""
    with steps.turns:
        run_now(job, steps)


def run_now(job: Job, steps: RunningSteps) -> None:
    """Runs a job whose turn it is; an exception is stored in the job."""
    if isinstance(job, ComputeJob):
        try:
            job.result = steps.run(job.work, StepKind.MEASURING)
        except Exception as error:
            job.error = error
        return
    job.started_ns = job.ended_ns = time.monotonic_ns()
    if job.deadline_ns <= job.started_ns:
        job.error = out_of_time()
        return
    job.computing = True
    key, booked_ns = job.partition.key, job.hop.reserved_duration_ns
    try:
        steps.run(partial(_compute, job), StepKind.BATCH, key, booked_ns)
    except (ClientError, OverloadError) as error:
        error.__traceback__ = None  # its frames hold the inputs, whose memory is released
        job.error = error
    except Exception as error:
        job.error = failure(error, batch_id=job.batch_id, partition=str(key))
    job.ended_ns = time.monotonic_ns()


def _compute(batch: Batch) -> None:
    executor = batch.partition.executor
    targets = None if batch.staged is None else batch.staged.arrays
    inputs = batch.gather()
    outputs = executor.run(inputs, targets)
    if len(outputs) != len(executor.outputs):
        raise InternalError(f"{len(outputs)} outputs; expected {len(executor.outputs)}")
    if batch.partition.batched and any(
        output.ndim == 0 or output.shape[0] != batch.rows for output in outputs
    ):
        raise InternalError("the partition did not keep the number of rows")
    if targets is None:
        # Tensors passed through are views of received memory, which is released before delivery.
        outputs = [_own(output, inputs) for output in outputs]
    batch.outputs = outputs


def _own(output: Array, inputs: Sequence[Array]) -> Array:
    shared = any(np.may_share_memory(output, each) for each in inputs)
    return output.copy() if shared else output
