"""The share of requests in time as the load grows: Figure 7."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_lab.scenarios.kinds import Job, Results
from catenary_lab.scenarios.pools.context import (
    Context,
    arrivals_name,
    context_of,
    loads_of,
    plan_of,
)
from catenary_lab.scenarios.pools.jobs import AttainmentJob, Served
from catenary_lab.scenarios.pools.schema import Attainment, Policy
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table, mean


def jobs(scenario: Attainment) -> list[Job[Served]]:
    """Returns one run per instance, policy, arrivals, load factor and seed."""
    context = context_of(scenario)
    return [
        job
        for arrivals in scenario.arrivals
        for instance in context.instances(scenario.instances)
        for policy in scenario.policies
        for factor in scenario.load_factors
        for job in _runs(scenario, context, (instance, policy, arrivals, factor))
    ]


def _runs(
    scenario: Attainment, context: Context, point: tuple[str, Policy, str, float]
) -> list[Job[Served]]:
    instance, policy, arrivals, factor = point
    plan = plan_of(context, instance, policy)
    return [
        AttainmentJob(plan, load, policy.dispatch, factor)
        for load in loads_of(scenario, policy, arrivals)
    ]


def report(scenario: Attainment, results: Results) -> Findings:
    """Returns one table and one panel per instance and kind of arrivals."""
    context = context_of(scenario)
    tables, panels = [], []
    facts = []
    for arrivals in scenario.arrivals:
        for instance in context.instances(scenario.instances):
            title = instance if arrivals == "poisson" else f"{instance}, {arrivals_name(arrivals)}"
            curves: dict[str, tuple[tuple[float, float], ...]] = {}
            for policy in scenario.policies:
                points = []
                for factor in scenario.load_factors:
                    runs = _runs(scenario, context, (instance, policy, arrivals, factor))
                    shares = [model.attainment for job in runs for model in results[job].models]
                    points.append((factor, mean(shares) or 0.0))
                curves[policy.label] = tuple(points)
            tables.append(_table(title, scenario, curves))
            panels.append(Lines(title, "load factor", "SLO attainment", curves))
            facts.append({"instance": instance, "arrivals": arrivals, "attainment": curves})
    seeds = ", ".join(map(str, scenario.seeds))
    note = f"Mean over the models; {scenario.duration_s:g} s per run, seeds {seeds}."
    return Findings(tuple(tables), tuple(panels), (note,), {"curves": facts})


def _table(
    title: str, scenario: Attainment, curves: Mapping[str, tuple[tuple[float, float], ...]]
) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (f"{factor:.2f}", *(points[index][1] for points in curves.values()))
        for index, factor in enumerate(scenario.load_factors)
    ]
    return Table(f"SLO attainment, {title}", ("load factor", *curves), tuple(rows))
