"""Exact twins of placement and re-balancing, and random cases to compare with (Aladdin, 4.1, 4.3).

They are slow and follow the paper to the letter: placement as the mixed-integer programme of
section 4.1 solved by HiGHS, with constraint e written out for every future step, and re-balancing
by trying every assignment. Tests and `benchmarks.placement.rebalance` use them; nothing that serves
does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import highspy

from catenary_scheduler.dispatch.placing.constraints import examine, place
from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_scheduler.dispatch.placing.rebalancing.error_lines import WorkerErrors, error_line
from catenary_scheduler.dispatch.placing.rebalancing.rebalance_search import Imbalance
from catenary_services.domain.latency import LatencyLines

MS = 1e6


@dataclass(frozen=True, slots=True)
class PlacementCase:
    """Workers with sessions, and requests that arrive together."""

    lines: LatencyLines
    limits: WorkerLimits
    workers: list[list[Job]]
    arriving: list[Job]


# ---- placement ----


def fewest_workers(case: PlacementCase) -> int | None:
    """Returns the fewest workers that must be opened; None if no placement is feasible.

    Readings are those of the specification: a lone session is exempt from b, its step must keep
    T_dec (R2); b-e bind on workers that gain a request only (R4).
    """
    workers = [*case.workers, *([] for _ in case.arriving)]
    programme = _Programme()
    chosen = [[programme.binary() for _ in case.arriving] for _ in workers]
    for number in range(len(case.arriving)):
        programme.row({row[number]: 1.0 for row in chosen}, 1.0, 1.0)  # a
    for number, (jobs, row) in enumerate(zip(workers, chosen, strict=True)):
        is_new = number >= len(case.workers)
        gains = programme.binary(cost=1.0 if is_new else 0.0)  # y, or "gains a request"
        for column in row:
            programme.at_most({column: 1.0, gains: -1.0}, 0.0)  # f
        _constrain(programme, case, jobs, row, gains)
    optimum = programme.solve()
    return None if optimum is None else round(optimum)


def _constrain(
    programme: _Programme, case: PlacementCase, jobs: list[Job], row: list[int], gains: int
) -> None:
    """Adds constraints b, c, d and e of one worker, which bind if it gains a request."""
    lines, limits, arriving = case.lines, case.limits, case.arriving
    slope = lines.decode_context_token_ns
    lone = None
    if not jobs:
        step = lines.decode(1, arriving[0].prompt_tokens)
        lone = programme.binary(most=1.0 if step <= limits.per_token_ns else 0.0)
        programme.at_most({**dict.fromkeys(row, 1.0), lone: len(row) - 1.0}, float(len(row)))
        programme.at_most({**dict.fromkeys(row, -1.0), gains: 2.0, lone: -1.0}, 0.0)
    # Constraint b, times k2: context and theta * c2 of each session, within theta * (T_dec - c3).
    each = limits.theta * lines.decode_session_ns
    context = {
        column: slope * (job.prompt_tokens + limits.gamma * job.final_tokens) + each
        for column, job in zip(row, arriving, strict=True)
    }
    held = sum(slope * (j.prompt_tokens + limits.gamma * j.final_tokens) + each for j in jobs)
    spare = limits.theta * (limits.per_token_ns - lines.decode_ns)
    programme.if_chosen(gains, context, spare - held, lone)
    if not limits.split_decode:
        waiting = sum(job.prompt_tokens for job in jobs if job.is_new)
        prompts = {
            column: lines.prefill_token_ns * job.prompt_tokens
            for column, job in zip(row, arriving, strict=True)
        }
        begun = lines.prefill_token_ns * waiting + lines.prefill_ns
        programme.if_chosen(gains, prompts, limits.first_token_ns - begun)  # c
        saved = [
            limits.per_token_ns * job.generated_tokens - job.decode_ns
            for job in jobs
            if not job.is_new
        ]
        if saved:
            programme.if_chosen(gains, prompts, limits.theta * min(saved) - begun)  # d
    for step_number in range(1 + max(_steps(job) for job in [*jobs, *arriving])):  # e
        caches = {
            column: _cache(lines, job, step_number)
            for column, job in zip(row, arriving, strict=True)
        }
        taken = sum(_cache(lines, job, step_number) for job in jobs)
        programme.if_chosen(gains, caches, limits.cache_capacity - taken)


def _steps(job: Job) -> int:
    return int(job.final_tokens) - job.generated_tokens


def _cache(lines: LatencyLines, job: Job, step: int) -> float:
    """Returns entry `step` of the vector w of a request."""
    if step > _steps(job):
        return 0.0
    return lines.cache(job.prompt_tokens + job.generated_tokens + step)


class _Programme:
    """A programme of binary variables for HiGHS, in milliseconds: nanoseconds lose digits."""

    def __init__(self) -> None:
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._solver.setOptionValue("mip_rel_gap", 0.0)
        self._columns = 0

    def binary(self, cost: float = 0.0, most: float = 1.0) -> int:
        self._solver.addCol(cost, 0.0, most, 0, [], [])
        self._solver.changeColIntegrality(self._columns, highspy.HighsVarType.kInteger)
        self._columns += 1
        return self._columns - 1

    def row(self, terms: dict[int, float], least: float, most: float) -> None:
        self._solver.addRow(least, most, len(terms), list(terms), list(terms.values()))

    def at_most(self, terms: dict[int, float], most: float) -> None:
        self.row(terms, -highspy.kHighsInf, most)

    def if_chosen(
        self, gains: int, terms: dict[int, float], most: float, unless: int | None = None
    ) -> None:
        """Adds `terms <= most` for the case that `gains` is 1 and `unless` 0 (smallest big M)."""
        scale = max(1.0, *terms.values())
        terms = {column: value / scale for column, value in terms.items()}
        most /= scale
        slack = max(0.0, sum(terms.values()) - most)
        limits = {**terms, gains: slack}
        if unless is not None:
            limits[unless] = -slack
        self.at_most(limits, most + slack)

    def solve(self) -> float | None:
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return float(self._solver.getObjectiveValue())


def opened_by_best_fit(case: PlacementCase) -> int | None:
    """Returns how many workers best fit opens for the requests one by one; None: inadmissible."""
    workers = [list(jobs) for jobs in case.workers]
    for job in case.arriving:
        at = place(case.lines, case.limits, workers, job)
        if at is None:
            return None
        if at == "new":
            workers.append([])
        workers[-1 if at == "new" else at].append(job)
    return len(workers) - len(case.workers)


def random_placement(seed: int, arriving: int = 1) -> PlacementCase:
    """Returns a case in which any constraint may bind; answers are short, for e step by step."""
    chance = random.Random(seed)
    lines = LatencyLines(
        prefill_token_ns=chance.uniform(0.5, 2.0) * MS,
        prefill_ns=chance.uniform(5.0, 15.0) * MS,
        decode_context_token_ns=chance.uniform(0.02, 0.05) * MS,
        decode_session_ns=chance.uniform(0.1, 0.6) * MS,
        decode_ns=chance.uniform(14.0, 18.0) * MS,
        decode_lone_ns=chance.uniform(15.0, 26.0) * MS,
        cache_token=chance.choice((1.0, chance.uniform(0.5, 2.0))),
        cache_session=chance.choice((0.0, chance.uniform(0.0, 4.0))),
    )
    limits = WorkerLimits(
        first_token_ns=round(chance.uniform(30.0, 120.0) * MS),
        per_token_ns=round(chance.uniform(22.0, 32.0) * MS),
        cache_capacity=chance.uniform(60.0, 400.0),
        gamma=chance.choice((0.0, 0.5, 1.0)),
        theta=chance.uniform(0.5, 1.0),
        split_decode=chance.random() < 0.15,
    )
    workers = [
        [_random_job(chance, limits) for _ in range(chance.randrange(6))]
        for _ in range(chance.randrange(1, 4))
    ]
    new = [Job(chance.randrange(1, 60), float(chance.randrange(1, 40))) for _ in range(arriving)]
    return PlacementCase(lines, limits, workers, new)


def _random_job(chance: random.Random, limits: WorkerLimits) -> Job:
    prompt, predicted = chance.randrange(1, 50), float(chance.randrange(1, 40))
    if chance.random() < 0.15:
        return Job(prompt, predicted)
    generated = chance.randrange(1, 50)
    pace = limits.per_token_ns * chance.uniform(0.2, 0.95)
    return Job(prompt, predicted, generated, (generated - 1) * pace, is_new=False)


# ---- re-balancing ----


def random_imbalance(seed: int, workers: int | None = None, new: int | None = None) -> Imbalance:
    """Returns errors of 2-3 workers and up to 6 new requests on them, with Llama-2-13b's lines."""
    chance = random.Random(seed)
    lines = LatencyLines(0.124329 * MS, 13.9 * MS, 0.000451 * MS, 0.0756 * MS, 22.51 * MS)
    count = workers or chance.randrange(2, 4)
    errors = [WorkerErrors() for _ in range(count)]
    for _ in range(chance.randrange(1, 2 * count + 1)):
        worker = errors[chance.randrange(count)]
        if chance.random() < 0.5:
            worker.outgrew(chance.randrange(50, 900))
        else:
            predicted = chance.randrange(100, 700)
            worker.ended_early(predicted, chance.randrange(1, predicted))
    requests = new or chance.randrange(1, 7)
    predicted_tokens = [float(chance.randrange(20, 700)) for _ in range(requests)]
    placed = [chance.randrange(count) for _ in range(requests)]
    return Imbalance([lines] * count, errors, predicted_tokens, placed)


def least_objective(problem: Imbalance) -> float:
    """Returns the least sum of distances over every assignment that is allowed."""
    placed = problem.placed
    best = float("inf")
    for assignment in itertools.product(range(len(problem.lines)), repeat=len(placed)):
        gaining = {at for at, was in zip(assignment, placed, strict=True) if at != was}
        fits = problem.fits
        if fits is not None and not all(
            fits(worker, [j for j, at in enumerate(assignment) if at == worker])
            for worker in gaining
        ):
            continue
        best = min(best, objective_of(problem, assignment))
    return best


def objective_of(problem: Imbalance, assignment: Sequence[int]) -> float:
    """Returns the sum of the distances of the error lines, for an assignment of the requests."""
    total = 0.0
    for worker, (lines, errors) in enumerate(zip(problem.lines, problem.errors, strict=True)):
        shifted = WorkerErrors(errors.tokens, errors.sessions)
        for tokens, at, was in zip(
            problem.predicted_tokens, assignment, problem.placed, strict=True
        ):
            change = (at == worker) - (was == worker)
            shifted.tokens += change * tokens
            shifted.sessions += change
        total += error_line(lines, shifted).distance
    return total


def with_constraints(problem: Imbalance, seed: int) -> Imbalance:
    """Returns a problem with sessions on the workers, so that b-e may forbid a move."""
    chance = random.Random(seed)
    limits = WorkerLimits(round(600 * MS), round(30 * MS), 4000.0, theta=0.8)
    ongoing = []
    for _ in problem.lines:
        here = []
        for _ in range(chance.randrange(5)):
            generated = chance.randrange(1, 300)
            decode_ns = (generated - 1) * chance.uniform(22.5, 29.0) * MS
            here.append(Job(chance.randrange(20, 900), 300.0, generated, decode_ns, is_new=False))
        ongoing.append(here)
    jobs = [Job(chance.randrange(20, 900), tokens) for tokens in problem.predicted_tokens]

    def fits(worker: int, requests: Sequence[int]) -> bool:
        *others, last = (jobs[each] for each in requests)
        return examine(problem.lines[worker], limits, [*ongoing[worker], *others], last).ok

    return Imbalance(problem.lines, problem.errors, problem.predicted_tokens, problem.placed, fits)
