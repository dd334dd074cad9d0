"""The load that each policy carries, and the utilisation of the GPUs then: Figures 6, 8 and 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from catenary_lab.scenarios.kinds import Job, Results
from catenary_lab.scenarios.pools import published
from catenary_lab.scenarios.pools.context import (
    Context,
    arrivals_name,
    context_of,
    loads_of,
    plan_of,
)
from catenary_lab.scenarios.pools.jobs import LoadFactorJob, Served
from catenary_lab.scenarios.pools.schema import LoadFactors, Policy, Utilisation
from catenary_lab.scenarios.report import Bars, Cell, Findings, Table, mean, percent
from catenary_simulator.load_factor import Search

ALL = "all"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of one run."""

    instance: str
    cluster: str
    policy: str
    arrivals: str
    seed: int
    model: str
    load_factor: float
    bound: float
    """Load factor that no scheduler exceeds on the plan, even if it knows all arrivals."""
    served_rps: float
    attainment: float
    mean_batch: float | None
    utilisation: Mapping[str, float]


def jobs(scenario: LoadFactors | Utilisation) -> list[Job[Served]]:
    """Returns one search per instance, policy, arrivals and seed."""
    return [job for _, _, _, job in _runs(scenario, context_of(scenario))]


def _runs(
    scenario: LoadFactors | Utilisation, context: Context
) -> list[tuple[str, Policy, str, LoadFactorJob]]:
    wanted = Search(scenario.target, scenario.highest, scenario.step)
    return [
        (
            instance,
            policy,
            arrivals,
            LoadFactorJob(plan_of(context, instance, policy), load, policy.dispatch, wanted),
        )
        for arrivals in scenario.arrivals
        for instance in context.instances(scenario.instances)
        for policy in scenario.policies
        for load in loads_of(scenario, policy, arrivals)
    ]


def entries(scenario: LoadFactors | Utilisation, context: Context, results: Results) -> list[Entry]:
    """Returns every model's figures."""
    return [
        Entry(
            instance,
            context.cluster_of(instance),
            policy.label,
            arrivals,
            job.load.seed,
            model.name,
            model.load_factor,
            results[job].bounds[model.name],
            model.load_factor * results[job].base_rps[model.name],
            model.attainment,
            model.mean_batch,
            results[job].utilisation,
        )
        for instance, policy, arrivals, job in _runs(scenario, context)
        for model in results[job].models
    ]


def report(scenario: LoadFactors, results: Results) -> Findings:
    """Returns load factors by cluster, beside the artifact's and the paper's."""
    context = context_of(scenario)
    found = entries(scenario, context, results)
    clusters = list(dict.fromkeys(each.cluster for each in found))
    tables, panels = [], []
    for arrivals in scenario.arrivals:
        ours = [each for each in found if each.arrivals == arrivals]
        tables.append(_table(scenario, context, arrivals, ours, clusters))
        if len(clusters) > 1 and (gains := _gains(scenario, arrivals, ours, clusters)) is not None:
            tables.append(gains)
        panels.append(_bars(scenario, arrivals, ours, clusters))
    facts = {"load_factors": [asdict(each) for each in found]}
    return Findings(tuple(tables), tuple(panels), _notes(scenario), facts)


def utilisation_report(scenario: Utilisation, results: Results) -> Findings:
    """Returns the utilisation of both classes by cluster, beside the paper's."""
    found = entries(scenario, context_of(scenario), results)
    clusters = list(dict.fromkeys(each.cluster for each in found))
    labels = [policy.label for policy in scenario.policies]
    rows: list[tuple[Cell, ...]] = []
    series: dict[str, tuple[float | None, ...]] = {}
    for place in (0, 1):
        kind = ("high class", "low class")[place]
        for label in labels:
            values = [_busy(found, label, cluster, place) for cluster in (*clusters, ALL)]
            rows.append((f"{label}, {kind}", *values))
            series[f"{label}, {kind}"] = tuple(values[:-1])
    paper = ", ".join(
        f"{label} {100 * share:.1f} %"
        for label, share in published.PAPER_LOW_CLASS_UTILISATION.items()
    )
    return Findings(
        (Table("Share of the GPUs' time spent computing", ("", *clusters, "mean"), tuple(rows)),),
        (Bars(scenario.title, "utilisation", tuple(clusters), series),),
        (*_notes(scenario), f"The paper, low class, mean: {paper}."),
        {"utilisation": {str(row[0]): row[1:] for row in rows}},
    )


def _busy(found: Sequence[Entry], label: str, cluster: str, place: int) -> float | None:
    # Classes are in the data set's order: high first.
    return mean(
        [
            list(each.utilisation.values())[place]
            for each in found
            if each.policy == label and cluster in (ALL, each.cluster)
        ]
    )


def _factor(found: Sequence[Entry], label: str, cluster: str) -> float | None:
    return mean(
        [
            each.load_factor
            for each in found
            if each.policy == label and cluster in (ALL, each.cluster)
        ]
    )


def _bound(found: Sequence[Entry], label: str, cluster: str) -> float | None:
    return mean(
        [each.bound for each in found if each.policy == label and cluster in (ALL, each.cluster)]
    )


def _table(
    scenario: LoadFactors,
    context: Context,
    arrivals: str,
    found: Sequence[Entry],
    clusters: Sequence[str],
) -> Table:
    columns = (*clusters, ALL) if len(clusters) > 1 else tuple(clusters)
    measured = context.measured() if arrivals == "poisson" else []
    rows: list[tuple[Cell, ...]] = []
    for policy in scenario.policies:
        ours = [_factor(found, policy.label, column) for column in columns]
        rows.append((policy.label, *ours))
        bounds = [_bound(found, policy.label, column) for column in columns]
        rows.append((f"- bound on {policy.label}", *bounds))
        scheduler = published.scheduler_of(policy)
        if scheduler is not None and measured and scenario.base_rps == "reference":
            theirs = [_theirs(measured, scheduler, found, clusters, each) for each in columns]
            if any(value is not None for value in theirs):
                rows.append((f"- the artifact, {scheduler}", *theirs))
    caption = (
        f"{arrivals_name(arrivals)} arrivals: largest load factor with "
        f"{100 * scenario.target:g} % in time"
    )
    header = ("", *("mean" if column == ALL else column for column in columns))
    return Table(caption, header, tuple(rows))


def _theirs(
    measured: list[published.Measured],
    scheduler: str,
    found: Sequence[Entry],
    clusters: Sequence[str],
    column: str,
) -> float | None:
    values = []
    for cluster in clusters if column == ALL else (column,):
        models = {
            (each.instance.partition("/")[0], each.model)
            for each in found
            if each.cluster == cluster
        }
        value = published.measured_mean(measured, scheduler, cluster, models)
        if value is None:
            return None
        values.append(value)
    return mean(values)


def _gains(
    scenario: LoadFactors, arrivals: str, found: Sequence[Entry], clusters: Sequence[str]
) -> Table | None:
    """Returns by how much the first policy exceeds NP and DART-r, beside the paper."""
    first = scenario.policies[0]
    key = "poisson" if arrivals == "poisson" else "bursty"
    paper = {"np": published.PAPER_OVER_NP[key], "dart-r": published.PAPER_OVER_DART[key]}
    rows: list[tuple[Cell, ...]] = []
    for policy in scenario.policies[1:]:
        if policy.planner not in paper:
            continue
        pairs = [(each, _factor(found, first.label, each)) for each in (*clusters, ALL)]
        ours = [percent(best, _factor(found, policy.label, each)) for each, best in pairs]
        rows.append((f"over {policy.label}", *ours))
        theirs = [paper[policy.planner].get(cluster) for cluster in clusters]
        known = [value for value in theirs if value is not None]
        middle = mean(known) if len(known) == len(theirs) else None
        stated = [None if value is None else f"{value:+.0f} %" for value in (*theirs, middle)]
        rows.append((f"- the paper's PPipe over {policy.label}", *stated))
    if not rows:
        return None
    caption = f"{arrivals_name(arrivals)} arrivals: load of {first.label} over the baselines"
    return Table(caption, ("", *clusters, "mean"), tuple(rows))


def _bars(
    scenario: LoadFactors, arrivals: str, found: Sequence[Entry], clusters: Sequence[str]
) -> Bars:
    labels = [policy.label for policy in scenario.policies]
    if len(clusters) > 1:
        groups = tuple(clusters)
        series = {label: tuple(_factor(found, label, each) for each in groups) for label in labels}
    else:
        groups = tuple(dict.fromkeys(each.model for each in found))
        series = {
            label: tuple(
                mean([e.load_factor for e in found if e.policy == label and e.model == model])
                for model in groups
            )
            for label in labels
        }
    return Bars(f"{arrivals_name(arrivals)} arrivals", "max. load factor", groups, series)


def _notes(scenario: LoadFactors) -> tuple[str, ...]:
    base = {
        "reference": "the artifact's PPipe rate of each model",
        "own": "weight x objective of the plan served",
    }[scenario.base_rps]
    seeds = {policy.label: policy.seeds or scenario.seeds for policy in scenario.policies}
    noise = (
        [f"Compute and transfer times vary with a coefficient of variation of {scenario.noise:g}."]
        if scenario.noise
        else []
    )
    said = "; ".join(f"{label} {', '.join(map(str, each))}" for label, each in seeds.items())
    return (
        f"Load factor 1 is {base}; {scenario.duration_s:g} s per run; seeds: {said};"
        f" searched from {scenario.highest:g} down in steps of {scenario.step:g}.",
        *noise,
    )
