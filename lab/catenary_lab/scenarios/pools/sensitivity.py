"""Our load over NP's as the SLO, the mix of GPUs or the planner's margin changes: Figure 13."""

from __future__ import annotations

from dataclasses import replace

from catenary_lab.pools.compared import Planner
from catenary_lab.pools.problems import known_models
from catenary_lab.scenarios.kinds import Job, Results
from catenary_lab.scenarios.pools.context import Context, context_of
from catenary_lab.scenarios.pools.jobs import (
    Load,
    LoadFactorJob,
    OfModel,
    Plan,
    Served,
    dataset_at,
)
from catenary_lab.scenarios.pools.schema import Sensitivity, matching
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table, mean, percent
from catenary_services.errors import InvalidInput
from catenary_simulator.load_factor import Search
from catenary_simulator.result import ModelResult

_PLANNERS: dict[str, Planner] = {"Catenary": "catenary", "NP": "np"}
_X_LABELS = {
    "slo_scale": "SLO / latency on the fastest GPU",
    "gpu_ratio": "share of high-class GPUs",
    "margin": "margin / SLO",
}
_HIGHEST = 1.5
"""Largest load factor to try: NP without a margin of its own can carry more than our plan
promises."""


def jobs(scenario: Sensitivity) -> list[Job[Served]]:
    """Returns one search per value, model, planner and seed."""
    context = context_of(scenario)
    return [
        job
        for value in scenario.values
        for planner in _PLANNERS.values()
        for job in _runs(scenario, context, value, planner)
    ]


def _runs(
    scenario: Sensitivity, context: Context, value: float | str, planner: Planner
) -> list[Job[Served]]:
    names = matching(scenario.models, list(known_models(dataset_at(context.dataset))), "models")
    wanted = Search(scenario.target, _HIGHEST, scenario.step)
    return [
        LoadFactorJob(
            Plan(context.dataset, _task(scenario, name, value), planner),
            Load("poisson", "catenary", scenario.duration_s, seed),
            "reservation",
            wanted,
            feasible=False,
        )
        for name in names
        for seed in scenario.seeds
    ]


def _task(scenario: Sensitivity, model: str, value: float | str) -> OfModel:
    gpus = tuple(scenario.gpus)
    slo_scale, margin = scenario.slo_scale, scenario.margin
    if scenario.vary == "gpu_ratio":
        gpus = _ratio(value)
    elif scenario.vary == "slo_scale":
        slo_scale = float(value)
    else:
        margin = float(value)
    return OfModel(scenario.cluster, model, gpus, slo_scale, margin)


def _ratio(value: float | str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in str(value).split(":"))
    except ValueError:
        counts = ()
    if len(counts) < 2 or min(counts) < 1:
        raise InvalidInput("values", f"{value!r} is not a ratio of GPUs like 4:12")
    return counts


def report(scenario: Sensitivity, results: Results) -> Findings:
    """Returns load factors and served rates over the values."""
    context = context_of(scenario)
    rows: list[tuple[Cell, ...]] = []
    factors: dict[str, list[tuple[float, float]]] = {label: [] for label in _PLANNERS}
    for value in scenario.values:
        found = _found(scenario, context, value, results)
        means = {
            label: mean([each.load_factor for each in models]) for label, models in found.items()
        }
        served = mean([each.offered_rps for each in found["Catenary"]])
        gain = percent(means["Catenary"], means["NP"])
        rows.append(
            (
                str(value),
                means["Catenary"],
                means["NP"],
                gain,
                _rate(served),
                str(len(found["Catenary"])),
            )
        )
        for label, points in factors.items():
            points.append((_x(scenario, value), means[label] or 0.0))
    header = (scenario.vary.replace("_", " "), *_PLANNERS, "gain", "served by Catenary", "runs")
    series = {label: tuple(points) for label, points in factors.items()}
    panel = Lines(scenario.title, _X_LABELS[scenario.vary], "max. load factor", series)
    caption = "Largest load factor, mean over models; 1 is what our plan promises"
    table = Table(caption, header, tuple(rows))
    return Findings((table,), (panel,), (_note(scenario, context),), {"rows": rows})


def _found(
    scenario: Sensitivity,
    context: Context,
    value: float | str,
    results: Results,
) -> dict[str, list[ModelResult]]:
    """Returns figures by planner, without the models that not even we can plan.

    A model that only NP cannot plan counts as served at no load by it.
    """
    ours = [results[job] for job in _runs(scenario, context, value, "catenary")]
    theirs = [results[job] for job in _runs(scenario, context, value, "np")]
    pairs = [(one.models[0], other) for one, other in zip(ours, theirs, strict=True) if one.models]
    return {
        "Catenary": [one for one, _ in pairs],
        "NP": [
            other.models[0] if other.models else replace(one, load_factor=0.0, offered_rps=0.0)
            for one, other in pairs
        ],
    }


def _x(scenario: Sensitivity, value: float | str) -> float:
    if scenario.vary != "gpu_ratio":
        return float(value)
    counts = _ratio(value)
    return counts[0] / sum(counts)


def _rate(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:.0f} requests/s"


def _note(scenario: Sensitivity, context: Context) -> str:
    models = matching(scenario.models, list(known_models(dataset_at(context.dataset))), "models")
    seeds = ", ".join(map(str, scenario.seeds))
    return (
        f"{len(models)} models, each alone on {sum(scenario.gpus)} GPUs of {scenario.cluster};"
        f" {scenario.duration_s:g} s per run, seeds {seeds}. Models without any plan are left out."
    )
