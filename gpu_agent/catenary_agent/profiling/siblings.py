"""The worker processes of one level: started, commanded and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from catenary_agent.executors.device import Device
from catenary_agent.profiling.samples import Runs
from catenary_agent.profiling.worker import LoadBlock, OrderFailed, RunBlock, SiblingBarriers, serve
from catenary_services.errors import InternalError, Unavailable, error_of_reason

ANSWER_S = 900.0
"""Seconds after which an order counts as hung."""
_END_S = 5.0


class SiblingProcesses:
    """One process for each virtual GPU of a device; all of them do the same at the same time."""

    def __init__(self, processes: list[SpawnProcess], connections: list[Connection]) -> None:
        """Takes over the processes that `virtual_gpus` has started."""
        self._processes = processes
        self._connections = connections

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def load(self, order: LoadBlock) -> None:
        """Returns when all processes have loaded a block.

        Raises:
            CatenaryError: The error of the first process that failed.
            Unavailable: A process died or takes too long.
        """
        self._ask(order)

    def run(self, order: RunBlock) -> list[Runs]:
        """Returns when each run began and ended, for each virtual GPU.

        Raises:
            CatenaryError: The error of the first process that failed.
            Unavailable: A process died or takes too long.
        """
        return [answer for answer in self._ask(order) if isinstance(answer, list)]

    def _ask(self, order: LoadBlock | RunBlock) -> list[object]:
        for number, connection in enumerate(self._connections):
            try:
                connection.send(order)
            except OSError:
                raise self._died(number) from None
        answers = self._answers(time.monotonic() + ANSWER_S)
        failures = [answer for answer in answers if isinstance(answer, OrderFailed)]
        # A worker whose sibling failed first reports only that; the actual cause sorts first.
        failures.sort(key=lambda failure: failure.reason == InternalError.reason)
        if failures:
            raise error_of_reason(failures[0].reason, failures[0].message)
        return answers

    def _answers(self, deadline: float) -> list[object]:
        """Waits for all at once, since one that died leaves its siblings waiting at the barrier."""
        number_of = {connection: number for number, connection in enumerate(self._connections)}
        answers: dict[int, object] = {}
        while len(answers) < len(number_of):
            left_s = deadline - time.monotonic()
            waiting = [each for each, number in number_of.items() if number not in answers]
            ready = wait(waiting, max(0.0, left_s))
            if not ready:
                raise Unavailable(f"a measurement took longer than {ANSWER_S:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                number = number_of[connection]
                try:
                    answers[number] = connection.recv()
                except (EOFError, OSError):
                    raise self._died(number) from None
        return [answers[number] for number in range(len(answers))]

    def _died(self, number: int) -> Unavailable:
        process = self._processes[number]
        process.join(_END_S)
        return Unavailable(
            f"measuring process {number} ended with exit code {process.exitcode};"
            " what was measured before is kept"
        )


@contextlib.contextmanager
def virtual_gpus(repository: Path, device: Device) -> Iterator[SiblingProcesses]:
    """Runs `device.virtual_level` processes, one per virtual GPU; ends them whatever happens."""
    # Not fork: threads, locks and a CUDA context of this process would be copied.
    context = multiprocessing.get_context("spawn")
    level = device.virtual_level
    barriers = SiblingBarriers(context.Barrier(level), context.Value("i", 0), level)
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for number in range(level):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, barriers, repository, device),
                name=f"virtual-gpu-{number}",
                daemon=True,
            )
            connections.append(ours)
            process.start()
            theirs.close()  # so that the end of the process closes the connection
            processes.append(process)
        yield SiblingProcesses(processes, connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            # An idle process ends when its connection closes; a busy one does not.
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
