"""Figures of runs by their names, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.packing.schema import Simulated
from catenary_lab.scenarios.packing.settings import Row, cases_of
from catenary_lab.scenarios.report import Bars, Cell, Measure, Table, mean
from catenary_simulator.packing.result import PackingResult

Facts = dict[str, Any]


MEASURES: Mapping[str, Measure] = {
    each.key: each
    for each in (
        Measure("gpus_mean", "GPUs, mean over time", digits=2),
        Measure("gpus_peak", "GPUs, peak", digits=1),
        Measure("utilisation", "GPU memory in use (%)", 100.0, 1),
        Measure("migrations_per_s", "migrations per second", digits=2),
        Measure("migrated_bytes_per_s", "caches that change their GPU (GB/s)", 1e-9, 2),
        Measure("preemptions_per_s", "preemptions per second", digits=2),
        Measure("lower_bound_gpus", "GPUs, lower bound", digits=2),
        Measure("decision_p50_us", "decision of an epoch, median (us)", digits=0),
        Measure("decision_p99_us", "decision of an epoch, 99th percentile (us)", digits=0),
        Measure("undisturbed", "cache held from arrival to end (% of requests)", 100.0, 1),
        Measure("held", "cache held, of the requests present at a time (%)", 100.0, 1),
        Measure("ended", "requests served", digits=0),
    )
}


def facts_of(rows: Iterable[Row], results: Results) -> list[Facts]:
    """Returns the figures of every run with its names."""
    facts = []
    for row in rows:
        found: PackingResult = results[row.job]
        facts.append(
            {
                "policy": row.policy,
                "case": f"{row.case}, seed {row.seed}",
                "gpu": row.gpu,
                "workload": row.workload,
                "seed": row.seed,
                **found.to_json(),
            }
        )
    return facts


def mean_of(facts: Iterable[Facts], key: str, case: str, policy: str) -> float | None:
    """Returns a figure's mean over the seeds of a case; None if a run lacks it."""
    values = [
        each[key]
        for each in facts
        if each["policy"] == policy and f"{each['gpu']}, {each['workload']}" == case
    ]
    return None if None in values else mean(values)


def table(scenario: Simulated, facts: Sequence[Facts], key: str) -> Table:
    """Returns a figure of all cases (rows) and policies; reference values below where known."""
    measure = MEASURES[key]
    labels = [each.label for each in scenario.policies]
    known = scenario.expected.get(key, {})
    bound = key == "gpus_mean"
    rows: list[tuple[Cell, ...]] = []
    for case in cases_of(scenario):
        cells = [measure.text(mean_of(facts, key, case, label)) for label in labels]
        if bound:
            cells.append(measure.text(mean_of(facts, "lower_bound_gpus", case, labels[0])))
        rows.append((case, *cells))
        if case in known:
            columns = [*labels, *(["lower bound"] if bound else [])]
            rows.append(("- reference", *(known[case].get(label) for label in columns)))
    header = ("", *labels, *(["lower bound"] if bound else []))
    return Table(measure.caption, header, tuple(rows))


def bars(scenario: Simulated, facts: Sequence[Facts], key: str, gpu: str) -> Bars:
    """Returns a picture of a figure: workloads side by side, one colour per policy."""
    measure = MEASURES[key]
    workloads = [each.label for each in scenario.workloads]
    series: dict[str, tuple[float | None, ...]] = {}
    for policy in scenario.policies:
        values = [mean_of(facts, key, f"{gpu}, {label}", policy.label) for label in workloads]
        series[policy.label] = tuple(
            None if each is None else measure.scale * each for each in values
        )
    return Bars(gpu, measure.caption, tuple(workloads), series)


def seeds_note(scenario: Simulated) -> str:
    """Returns how the runs were made, for below the tables."""
    seeds = ", ".join(map(str, scenario.seeds))
    return (
        f"{scenario.duration_s:g} s after {scenario.warm_up_s:g} s of warm-up from an empty "
        f"cluster, epochs of {scenario.epoch_s:g} s, {_counted(len(scenario.seeds), 'seed')} "
        f"({seeds})."
    )


def violations_of(facts: Iterable[Facts]) -> int:
    """Returns how many times an invariant did not hold, over all runs."""
    return sum(each["violations"] for each in facts)


def _counted(count: int, what: str) -> str:
    return f"one {what}" if count == 1 else f"means of {count} {what}s"
