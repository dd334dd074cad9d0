"""The duration of planning as the cluster gets larger and more mixed: Figure 14."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from catenary_lab.pools import compared
from catenary_lab.pools.problems import of_classes, of_models
from catenary_lab.scenarios.kinds import Job, Results
from catenary_lab.scenarios.pools import published
from catenary_lab.scenarios.pools.context import Context, context_of
from catenary_lab.scenarios.pools.jobs import dataset_at
from catenary_lab.scenarios.pools.schema import PlannerScaling
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table
from catenary_services.errors import PlanInfeasible

NO_PLAN = "no plan"
"""Solver of a cluster that is too small; its time is that of the answer with the reason."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The figures of planning one cluster."""

    seconds: float
    objective: float
    gap: float
    """Bound on how far the plan is below the best one: bound / objective - 1."""
    solver: str


@dataclass(frozen=True, slots=True)
class PlanningJob:
    """Plans one cluster."""

    dataset: Path
    instance: str
    models: int
    """Number of models; 0: those of the instance."""
    classes: tuple[str, ...]
    gpus: int
    first_share: float
    server_gbps: float
    max_partitions: int

    def run(self) -> Planned:
        dataset = dataset_at(self.dataset)
        problem = dataset.problem(self.instance, self.max_partitions)
        if self.models:
            problem = of_models(problem, dataset, self.models)
        problem = of_classes(problem, self.classes, self.gpus, self.first_share, self.server_gbps)
        begun = time.perf_counter()
        try:
            plan = compared.make(problem, "catenary")
        except PlanInfeasible:
            return Planned(time.perf_counter() - begun, 0.0, 0.0, NO_PLAN)
        gap = plan.bound / plan.objective - 1 if plan.objective > 0 else 0.0
        return Planned(plan.seconds, plan.objective, max(0.0, gap), plan.solver)


def jobs(scenario: PlannerScaling) -> list[Job[Planned]]:
    """Returns one job per number of models, mix of classes and size."""
    context = context_of(scenario)
    return [job for row in _rows(scenario) for job in _sizes(scenario, context, *row)]


def _rows(scenario: PlannerScaling) -> list[tuple[int, list[str]]]:
    """Returns the number of models and the classes of each row; 0 models: the instance's."""
    return [(models, classes) for models in scenario.models or [0] for classes in scenario.classes]


def _sizes(
    scenario: PlannerScaling, context: Context, models: int, classes: list[str]
) -> list[PlanningJob]:
    return [
        PlanningJob(
            context.dataset,
            scenario.instance,
            models,
            tuple(classes),
            gpus,
            scenario.first_share,
            scenario.server_gbps,
            scenario.max_partitions,
        )
        for gpus in scenario.gpus
    ]


def _gap(planned: Planned) -> str:
    if planned.solver == NO_PLAN:
        return NO_PLAN
    return f"{100 * planned.gap:.2f} % ({planned.solver})"


def report(scenario: PlannerScaling, results: Results) -> Findings:
    """Returns seconds and gaps by size and mix."""
    context = context_of(scenario)
    seconds: list[tuple[Cell, ...]] = []
    gaps: list[tuple[Cell, ...]] = []
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    facts = []
    for models, classes in _rows(scenario):
        label = " + ".join(classes) + (f", {models} models" if models else "")
        done = [(job, results[job]) for job in _sizes(scenario, context, models, classes)]
        seconds.append((label, *(each.seconds for _, each in done)))
        gaps.append((label, *(_gap(each) for _, each in done)))
        curves[label] = tuple((float(job.gpus), each.seconds) for job, each in done)
        many = {"models": models} if models else {}
        facts += [
            {**many, "classes": classes, "gpus": job.gpus, **asdict(each)} for job, each in done
        ]
    header = ("GPU classes", *(f"{gpus:,} GPUs" for gpus in scenario.gpus))
    panel = Lines(scenario.title, "GPUs", "seconds", curves, log_x=True, log_y=True)
    paper = ", ".join(
        f"{count} classes {value:g} s" for count, value in published.PAPER_PLANNER_SECONDS.items()
    )
    return Findings(
        (
            Table("Planning time in seconds, enumeration included", header, tuple(seconds)),
            Table("Proven gap to the optimum (solver)", header, tuple(gaps)),
        ),
        (panel,),
        (f"The paper (Gurobi, 100 GPUs, up to 2 partitions): {paper}.",),
        {"plans": facts},
    )
