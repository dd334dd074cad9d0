"""Replay of re-balancing: where new requests move after errors of predictions were counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catenary_scheduler.dispatch.placing.constraints import examine
from catenary_scheduler.dispatch.placing.jobs import Job
from catenary_scheduler.dispatch.placing.rebalancing.error_lines import WorkerErrors
from catenary_scheduler.dispatch.placing.rebalancing.rebalance import rebalance
from catenary_scheduler.dispatch.placing.rebalancing.rebalance_search import Fits, Imbalance
from catenary_services.domain.latency import LatencyLines
from catenaryd.replay.fields import JsonFields
from catenaryd.replay.workers import read_job, read_limits, read_lines

_MOST_WORKERS = 100_000
_EXACT_STEPS = 200_000
"""The most steps of an exact search, about half a second: a command need not be faster."""


def replay_rebalance(case: JsonFields) -> dict[str, Any]:
    """Returns the result of one case: `l_e`, `b_e`, `objective` and `assignment`."""
    lines = read_lines(case.object("perf"))
    workers = case.whole("workers", least=1, most=_MOST_WORKERS)
    errors = [WorkerErrors() for _ in range(workers)]
    for event in case.objects("events"):
        _count(event, errors)
    new = case.objects("new")
    jobs = [read_job(each) for each in new]
    names = [each.whole("id") for each in new]
    if len(set(names)) < len(names):
        raise case.wrong("new", "two requests have the same id")
    done = rebalance(
        Imbalance(
            lines=[lines] * workers,
            errors=errors,
            predicted_tokens=[job.predicted_tokens for job in jobs],
            placed=[each.whole("worker", most=workers - 1) for each in new],
            fits=_constraints(case, lines, workers, jobs),
        ),
        _EXACT_STEPS,
    )
    return {
        "l_e": [each.tokens for each in errors],
        "b_e": [each.sessions for each in errors],
        "objective": done.objective,
        "assignment": dict(zip(map(str, names), done.assignment, strict=True)),
    }


def rebalance_words(result: dict[str, Any]) -> str:
    places = [f"{request} on {worker}" for request, worker in result["assignment"].items()]
    return f"error {result['objective']:.6g}, request {', '.join(places) or 'none'}"


def _count(event: JsonFields, errors: Sequence[WorkerErrors]) -> None:
    worker = errors[event.whole("worker", most=len(errors) - 1)]
    kind = event.text("kind", "")
    if kind == "under":
        worker.outgrew(event.number("l_pred_new"))
    elif kind == "over":
        worker.ended_early(event.number("l_pred"), event.whole("l_real"))
    else:
        raise event.wrong("kind", "is neither 'under' nor 'over'")


def _constraints(
    case: JsonFields, lines: LatencyLines, workers: int, jobs: Sequence[Job]
) -> Fits | None:
    """Returns a check of constraints b-e, None if the case lacks what they need.

    Without the check no constraint binds.
    """
    if not case.has("params") and not case.has("ongoing"):
        return None
    limits = read_limits(case.object("params"))
    ongoing = [[read_job(each) for each in row] for row in case.lists("ongoing")]
    if len(ongoing) != workers:
        raise case.wrong("ongoing", f"must be a list for each of the {workers} workers")

    def fits(worker: int, requests: Sequence[int]) -> bool:
        *others, last = (jobs[request] for request in requests)
        return examine(lines, limits, [*ongoing[worker], *others], last).ok

    return fits
