"""Replay of placement: the worker that a request goes to, and constraints b-e of every worker."""

from __future__ import annotations

from typing import Any

from catenary_scheduler.dispatch.placing.constraints import WorkerConstraint, examine, place
from catenaryd.replay.fields import JsonFields
from catenaryd.replay.workers import NANOSECONDS_PER_MS, read_job, read_limits, read_lines


def replay_placement(case: JsonFields) -> dict[str, Any]:
    """Returns the decision on one case: `worker` and `constraints`, in the units of the cases."""
    lines, limits = read_lines(case.object("perf")), read_limits(case.object("params"))
    workers = [[read_job(each) for each in jobs] for jobs in case.lists("workers")]
    added = read_job(case.object("request"))
    constraints = []
    for worker, jobs in [*enumerate(workers), ("new", [])]:
        checked = examine(lines, limits, jobs, added)
        constraints.append(
            {
                "worker": worker,
                "norm": checked.norm,
                "b": _bound(checked.context),
                "c": _bound(checked.prompts, NANOSECONDS_PER_MS),
                "d": _bound(checked.slack, NANOSECONDS_PER_MS),
                "e": _bound(checked.cache),
            }
        )
    return {"worker": place(lines, limits, workers, added), "constraints": constraints}


def placement_words(result: dict[str, Any]) -> str:
    if result["worker"] is None:
        return "not admissible"
    return "a new worker" if result["worker"] == "new" else f"worker {result['worker']}"


def _bound(bound: WorkerConstraint, unit: float = 1.0) -> dict[str, Any]:
    return {
        "ok": bound.ok,
        "lhs": None if bound.used is None else bound.used / unit,
        "rhs": None if bound.allowed is None else bound.allowed / unit,
    }
