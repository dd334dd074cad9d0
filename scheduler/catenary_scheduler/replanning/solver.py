"""Solves planning tasks in a process of its own, so that no request waits for it.

The process gets a pickled `SolverTask`, `ChainCluster` or `QuestionTask` on standard input and
answers with a pickled `SolverResult`, `ComposedChains`, `PlanAnswer` or `Infeasible`; both ends are
this program. It runs at low priority and is killed when it takes too long; a crash costs a plan and
nothing else.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from catenary_scheduler.planning.live import ChainCluster
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_scheduler.planning.search import PlanAnswer
from catenary_scheduler.planning.search.question import PlanQuestion
from catenary_scheduler.replanning.chain_builder import ComposedChains
from catenary_services.errors import InternalError, PlanInfeasible, Unavailable
from catenary_services.log import get_logger

_log = get_logger(__name__)
T = TypeVar("T")
_MODULE = "catenary_scheduler.replanning.solver_worker"
_GRACE_S = 10.0
"""Longest time to start Python and import, in seconds; it is no part of the solver's limit."""


@dataclass(frozen=True, slots=True)
class SolverTask:
    """Input of the process for a pooled plan."""

    problem: PoolingProblem
    time_limit_s: float


@dataclass(frozen=True, slots=True)
class SolverResult:
    """Answer of the process: the problem with the times batches take to fill, its plan, and why."""

    problem: PoolingProblem
    plan: PooledPlan
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuestionTask:
    """Input of the process for a question about a plan that nobody puts in force."""

    question: PlanQuestion
    time_limit_s: float


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Answer of the process if there is no plan; `message` names the constraint."""

    message: str


class Solver:
    """Runs one process per task.

    Args:
        time_limit_s: Time for solving.
        module: The module that is run; tests name modules that crash or hang.
    """

    def __init__(self, time_limit_s: float, module: str = _MODULE) -> None:
        self._time_limit_s = time_limit_s
        self._module = module

    async def solve(self, problem: PoolingProblem) -> SolverResult:
        """Returns the best plan found within the limit.

        Raises:
            PlanInfeasible: There is no plan.
            Unavailable: No plan was found in time.
            InternalError: The process crashed.
        """
        task = SolverTask(problem, self._time_limit_s)
        return await self._ask(task, SolverResult, self._time_limit_s)

    async def compose(self, cluster: ChainCluster) -> ComposedChains:
        """Returns the chains of the models of a cluster.

        Raises:
            Unavailable: They were not found in time.
            InternalError: The process crashed.
        """
        return await self._ask(cluster, ComposedChains, self._time_limit_s)

    async def answer(self, question: PlanQuestion, most_s: float) -> PlanAnswer:
        """Returns the answer to a question within the limit, and within `most_s` seconds.

        Raises:
            PlanInfeasible: There is no plan.
            Unavailable: It was not found in time.
            InternalError: The process crashed.
        """
        limit_s = min(self._time_limit_s, most_s)
        return await self._ask(QuestionTask(question, limit_s), PlanAnswer, limit_s)

    async def _ask(
        self, question: SolverTask | ChainCluster | QuestionTask, kind: type[T], limit_s: float
    ) -> T:
        """Returns what a process answers, which is of a certain kind."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        talking = asyncio.ensure_future(process.communicate(pickle.dumps(question)))
        try:
            done, _ = await asyncio.wait({talking}, timeout=limit_s + _GRACE_S)
            if not done:
                raise Unavailable(f"the solver found no plan within {limit_s:g} s")
            output, errors = talking.result()
        finally:
            await _end(process, talking)
        answer = _answer(process.returncode, output, errors)
        if not isinstance(answer, kind):
            raise InternalError(f"the solver answered something else than {kind.__name__}")
        return answer


async def _end(
    process: asyncio.subprocess.Process, talking: asyncio.Future[tuple[bytes, bytes]]
) -> None:
    """Ends the process and the task that talks to it, whatever happened."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    talking.cancel()
    await asyncio.wait({talking})
    if process.returncode is None:
        await process.wait()


def _answer(code: int | None, output: bytes, errors: bytes) -> object:
    said = errors.decode(errors="replace").strip().splitlines()
    last = said[-1] if said else "it said nothing"
    if code != 0:
        _log.error("solver_crashed", exit_code=code, error=last)
        raise InternalError(f"the solver ended with exit code {code}: {last}")
    try:
        answer: object = pickle.loads(output)  # from a child of this process
    except Exception as error:
        raise InternalError(f"the solver's answer cannot be read: {error!r}; {last}") from error
    if isinstance(answer, Infeasible):
        raise PlanInfeasible(answer.message)
    return answer


def _environment() -> dict[str, str]:
    """Returns our environment, with the import path that this process really has."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path}
