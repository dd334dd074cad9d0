"""One virtual GPU of a measurement: a process that runs blocks in step with its siblings.

A process, because agents are processes: threads of one would share an interpreter lock, a CUDA
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
from catenary_agent.share import Claim, take_share
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import CatenaryError, InternalError
from catenary_services.log import configure_logging
from catenary_services.models.model_repository import ModelRepository

if TYPE_CHECKING:
    from catenary_agent.executors.base import Executor

GATE_S = 120.0
"""Siblings that take longer to warm up a batch than this are lost."""
_WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Order: load this block; answered by the bytes of its weights."""

    key: PartitionKey
    float16_boundaries: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Order: run the block at `rows` until all siblings have done this much; answered by Runs."""

    rows: int
    at_least_runs: int
    at_least_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer to an order that could not be carried out."""

    reason: str
    message: str


class Counter(Protocol):
    """A `multiprocessing.Value`: how many siblings have run enough."""

    value: int

    def get_lock(self) -> Any:
        """Returns the lock that guards it."""
        ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the siblings keep in step by."""

    gate: Barrier
    enough: Counter
    level: int


def serve(orders: Connection, meeting: Meeting, repository: Path, device: Device) -> None:
    """Carries out orders until the other end closes the connection. Runs in its own process."""
    # Ctrl-C reaches the whole group of processes; the one that gave us orders ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("profile", f"virtual-gpu-{os.getpid()}", "error", False)
    virtual_gpu = _VirtualGpu(meeting, ModelRepository(repository), device)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        try:
            answer: object = virtual_gpu.obey(order)
        except CatenaryError as error:
            answer = Failed(error.reason, error.message)
        except BrokenBarrierError:
            answer = Failed(InternalError.reason, "a sibling gave up")
        except Exception as error:  # whatever a runtime raises has to reach the person who waits
            answer = Failed(InternalError.reason, f"{type(error).__name__}: {error}")
        if isinstance(answer, Failed):
            meeting.gate.abort()
        try:
            orders.send(answer)
        except OSError:
            return  # nobody waits any more


class _VirtualGpu:
    """The block loaded at present, and how to run it."""

    def __init__(self, meeting: Meeting, repository: ModelRepository, device: Device) -> None:
        self._meeting = meeting
        self._repository = repository
        self._device = device
        self._threads = 0
        self._executor: Executor | None = None

    def obey(self, order: Load | Run) -> object:
        """Returns the answer to an order."""
        return self._load(order) if isinstance(order, Load) else self._run(order)

    def _load(self, order: Load) -> int:
        if not self._threads:  # before any runtime is imported
            self._threads = take_share(Claim(self._device)).threads
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

    def _run(self, order: Run) -> list[tuple[int, int]]:
        executor = self._executor
        assert executor is not None
        meeting = self._meeting
        arrays = executor.ends.example_arrays(order.rows)
        outputs = None
        for _ in range(_WARM_UP_RUNS):
            results = executor.run(arrays, outputs)
            # Served parts write into buffers they are given, wherever the shapes are known.
            known = executor.output_shapes([array.shape for array in arrays]) is not None
            outputs = results if known and all(r.flags.writeable for r in results) else None
        # The first to arrive clears the count of the last order; nobody runs before all are here.
        if meeting.gate.wait(GATE_S) == 0:
            meeting.enough.value = 0
        meeting.gate.wait(GATE_S)
        runs: list[tuple[int, int]] = []
        begun = time.monotonic_ns()
        said = False
        while meeting.enough.value < meeting.level:
            started = time.monotonic_ns()
            executor.run(arrays, outputs)
            ended = time.monotonic_ns()
            runs.append((started, ended))
            if not said and len(runs) >= order.at_least_runs and ended - begun >= order.at_least_ns:
                said = True
                with meeting.enough.get_lock():
                    meeting.enough.value += 1
        return runs
