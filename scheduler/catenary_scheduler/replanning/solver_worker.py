"""Solves one planning task; `solver.py` starts it with `python -m`, in a process of its own."""

from __future__ import annotations

import os
import pickle
import sys
import time

from catenary_scheduler.planning.live import ChainCluster, with_batch_building
from catenary_scheduler.planning.pooled import explain_plan, plan_pools
from catenary_scheduler.replanning.chain_builder import compose_cluster
from catenary_scheduler.replanning.solver import Infeasible, SolverResult, SolverTask
from catenary_services.errors import PlanInfeasible

_NICENESS = 10


def solve(task: SolverTask) -> SolverResult | Infeasible:
    """Returns the plan, found in two rounds: the first tells how fast batches fill."""
    half_s = task.time_limit_s / 2
    try:
        first = plan_pools(task.problem, time_limit_s=half_s, clock=time.perf_counter)
        problem = with_batch_building(task.problem, first)
        plan = plan_pools(problem, time_limit_s=half_s, clock=time.perf_counter)
    except PlanInfeasible as error:
        return Infeasible(error.message)
    return SolverResult(problem, plan, tuple(explain_plan(problem, plan)))


def main() -> None:
    """Reads a task from standard input, writes the answer to standard output."""
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    question = pickle.load(sys.stdin.buffer)
    assert isinstance(question, SolverTask | ChainCluster)
    with answers:
        if isinstance(question, SolverTask):
            pickle.dump(solve(question), answers)
        else:
            pickle.dump(compose_cluster(question), answers)


if __name__ == "__main__":
    main()
