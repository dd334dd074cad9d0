"""One virtual GPU of a measurement: a process that runs blocks in step with its siblings.

It is a process because agents are processes: threads would share an interpreter lock, a CUDA
context and a thread pool that agents do not share.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import TYPE_CHECKING, Any, Protocol

from catenary_agent.executors.device import Device
from catenary_agent.share import ShareRequest, take_share
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import CatenaryError, InternalError
from catenary_services.log import configure_logging
from catenary_services.models.model_repository import ModelRepository

if TYPE_CHECKING:
    from catenary_agent.executors.base import Executor

BARRIER_S = 120.0
"""Seconds for which a process waits for its siblings to warm up before it gives up."""
_WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """The order to load a block; answered by the bytes of its weights."""

    key: PartitionKey
    float16_boundaries: bool


@dataclass(frozen=True, slots=True)
class RunBlock:
    """The order to run the block until all siblings have run this much; answered by `Runs`."""

    rows: int
    at_least_runs: int
    at_least_ns: int


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """The answer to an order that could not be carried out."""

    reason: str
    message: str


class SharedCounter(Protocol):
    """A `multiprocessing.Value` that counts the siblings that have run enough."""

    value: int

    def get_lock(self) -> Any:
        """Returns the lock that guards `value`."""
        ...


@dataclass(frozen=True, slots=True)
class SiblingBarriers:
    """The objects that keep siblings in step."""

    barrier: Barrier
    enough: SharedCounter
    level: int


def serve(orders: Connection, barriers: SiblingBarriers, repository: Path, device: Device) -> None:
    """Carries out orders until the other end closes the connection; runs in its own process."""
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("profile", f"virtual-gpu-{os.getpid()}", "error", False)
    virtual_gpu = _VirtualGpu(barriers, ModelRepository(repository), device)
    while True:
        try:
            order = orders.recv()
        except (EOFError, ConnectionResetError):  # reset if it did not read the last answer
            return
        try:
            answer: object = virtual_gpu.obey(order)
        except CatenaryError as error:
            answer = OrderFailed(error.reason, error.message)
        except BrokenBarrierError:
            answer = OrderFailed(InternalError.reason, "a sibling gave up")
        except Exception as error:  # whatever a runtime raises has to reach the person who waits
            answer = OrderFailed(InternalError.reason, f"{type(error).__name__}: {error}")
        if isinstance(answer, OrderFailed):
            barriers.barrier.abort()
        try:
            orders.send(answer)
        except OSError:
            return  # the parent has gone


class _VirtualGpu:
    """The loaded block of one virtual GPU, and the means to run it."""

    def __init__(
        self, barriers: SiblingBarriers, repository: ModelRepository, device: Device
    ) -> None:
        self._barriers = barriers
        self._repository = repository
        self._device = device
        self._threads = 0
        self._executor: Executor | None = None

    def obey(self, order: LoadBlock | RunBlock) -> object:
        """Returns the answer to an order."""
        return self._load(order) if isinstance(order, LoadBlock) else self._run(order)

    def _load(self, order: LoadBlock) -> int:
        if not self._threads:  # before any runtime is imported
            self._threads = take_share(ShareRequest(self._device)).threads
        from catenary_agent.executors.loading import load_executor

        if self._executor is not None:
            self._executor.close()
        self._executor = load_executor(
            self._repository,
            order.key,
            device=self._device,
            float16_boundaries=order.float16_boundaries,
            threads=self._threads,
        )
        return self._executor.memory_bytes

    def _run(self, order: RunBlock) -> list[tuple[int, int]]:
        executor = self._executor
        assert executor is not None
        barriers = self._barriers
        arrays = executor.ends.example_arrays(order.rows)
        outputs = None
        for _ in range(_WARM_UP_RUNS):
            results = executor.run(arrays, outputs)
            # Served parts write into given buffers wherever the shapes are known.
            known = executor.output_shapes([array.shape for array in arrays]) is not None
            outputs = results if known and all(r.flags.writeable for r in results) else None
        # The first to arrive resets the counter; no run begins before all siblings are here.
        if barriers.barrier.wait(BARRIER_S) == 0:
            barriers.enough.value = 0
        barriers.barrier.wait(BARRIER_S)
        runs: list[tuple[int, int]] = []
        begun = time.monotonic_ns()
        said = False
        while barriers.enough.value < barriers.level:
            started = time.monotonic_ns()
            executor.run(arrays, outputs)
            ended = time.monotonic_ns()
            runs.append((started, ended))
            if not said and len(runs) >= order.at_least_runs and ended - begun >= order.at_least_ns:
                said = True
                with barriers.enough.get_lock():
                    barriers.enough.value += 1
        return runs
