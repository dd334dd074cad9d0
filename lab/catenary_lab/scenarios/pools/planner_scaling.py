"""The duration of planning as the cluster gets larger and more mixed: Figure 14."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from catenary_lab.pools import compared
from catenary_lab.pools.problems import of_classes
from catenary_lab.scenarios.kinds import Job, Results
from catenary_lab.scenarios.pools import published
from catenary_lab.scenarios.pools.context import Context, context_of
from catenary_lab.scenarios.pools.jobs import dataset_at
from catenary_lab.scenarios.pools.schema import PlannerScaling
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table


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
    classes: tuple[str, ...]
    gpus: int
    first_share: float
    server_gbps: float
    max_partitions: int

    def run(self) -> Planned:
        problem = dataset_at(self.dataset).problem(self.instance, self.max_partitions)
        problem = of_classes(problem, self.classes, self.gpus, self.first_share, self.server_gbps)
        plan = compared.make(problem, "catenary")
        gap = plan.bound / plan.objective - 1 if plan.objective > 0 else 0.0
        return Planned(plan.seconds, plan.objective, max(0.0, gap), plan.solver)


def jobs(scenario: PlannerScaling) -> list[Job[Planned]]:
    """Returns one job per mix of classes and size."""
    context = context_of(scenario)
    return [job for classes in scenario.classes for job in _sizes(scenario, context, classes)]


def _sizes(scenario: PlannerScaling, context: Context, classes: list[str]) -> list[PlanningJob]:
    return [
        PlanningJob(
            context.dataset,
            scenario.instance,
            tuple(classes),
            gpus,
            scenario.first_share,
            scenario.server_gbps,
            scenario.max_partitions,
        )
        for gpus in scenario.gpus
    ]


def report(scenario: PlannerScaling, results: Results) -> Findings:
    """Returns seconds and gaps by size and mix."""
    context = context_of(scenario)
    seconds: list[tuple[Cell, ...]] = []
    gaps: list[tuple[Cell, ...]] = []
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    facts = []
    for classes in scenario.classes:
        label = " + ".join(classes)
        done = [(job, results[job]) for job in _sizes(scenario, context, classes)]
        seconds.append((label, *(each.seconds for _, each in done)))
        gaps.append((label, *(f"{100 * each.gap:.2f} % ({each.solver})" for _, each in done)))
        curves[label] = tuple((float(job.gpus), each.seconds) for job, each in done)
        facts += [{"classes": classes, "gpus": job.gpus, **asdict(each)} for job, each in done]
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
