"""Solves one planning task; `solver.py` starts it with `python -m`, in a process of its own."""

from __future__ import annotations

import os
import pickle
import sys
import time

from catenary_scheduler.planning.live import ChainCluster
from catenary_scheduler.planning.pooled import explain_plan
from catenary_scheduler.planning.search.answering import answered
from catenary_scheduler.planning.search.options import PlanAnswer
from catenary_scheduler.planning.search.pools import plan_in_two_rounds
from catenary_scheduler.replanning.chain_builder import compose, compose_cluster
from catenary_scheduler.replanning.solver import (
    Infeasible,
    QuestionTask,
    SolverResult,
    SolverTask,
)
from catenary_services.errors import PlanInfeasible

_NICENESS = 10


def solve(task: SolverTask) -> SolverResult | Infeasible:
    """Returns the plan, or why there is none."""
    try:
        problem, plan = plan_in_two_rounds(task.problem, task.time_limit_s, time.perf_counter)
    except PlanInfeasible as error:
        return Infeasible(error.message)
    return SolverResult(problem, plan, tuple(explain_plan(problem, plan)))


def answer(task: QuestionTask) -> PlanAnswer | Infeasible:
    """Returns the answer to a question, or why no option is possible."""
    try:
        return answered(task.question, compose, task.time_limit_s, time.perf_counter)
    except PlanInfeasible as error:
        return Infeasible(error.message)


def main() -> None:
    """Reads a task from standard input, writes the answer to standard output."""
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    question = pickle.load(sys.stdin.buffer)
    assert isinstance(question, SolverTask | ChainCluster | QuestionTask)
    with answers:
        if isinstance(question, SolverTask):
            pickle.dump(solve(question), answers)
        elif isinstance(question, QuestionTask):
            pickle.dump(answer(question), answers)
        else:
            pickle.dump(compose_cluster(question), answers)


if __name__ == "__main__":
    main()
