"""The command `catenaryd simulate pools`: what pooled pipelines would serve, on a virtual clock."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from catenary_scheduler.dispatch import PooledDispatcher
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import InvalidInput
from catenary_simulator import (
    Disturbance,
    ModelResult,
    SimulationOptions,
    SimulationResult,
    max_load_factor,
    parse_arrivals,
    simulate,
)
from catenary_simulator.options import DispatcherFactory
from catenary_simulator.pools import OWN_MARGIN, reference_rates, with_margin
from catenaryd.plug_ins import (
    DISPATCHERS,
    PLANNERS,
    SIMULATIONS,
    PlugInChoice,
    PoolsPlanner,
    plug_in,
)
from catenaryd.shared_options import AS_JSON

T = TypeVar("T", int, float)
_OF_FILES = ("scenarios", "schema", "live", "quick", "out", "workers")
"""Flags that are only for scenario files."""


@click.command("pools")
@click.argument("scenarios", nargs=-1, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--schema", is_flag=True, help="Print the JSON schema of scenario files.")
@click.option("--live", is_flag=True, help="Run scenarios that can on real processes as well.")
@click.option("--quick", is_flag=True, help="The short form of each scenario.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for plots, facts and the tables in pooled-pipelines.md.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    help="Simulations at a time; 0: one per CPU.",
)
@click.option(
    "--dataset",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder in the format of tests/data/ppipe.",
)
@click.option("--instance", help="Planning instance, by its id.")
@click.option(
    "--planner",
    type=PlugInChoice(PLANNERS, "catenary"),
    default="catenary",
    show_default=True,
    help="Whose plan; reference: the data set's own.",
)
@click.option(
    "--max-partitions",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Longest pipeline of the planner catenary.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=OWN_MARGIN,
    show_default=True,
    help="Share of the SLO the planner catenary keeps free; never more than the instance does.",
)
@click.option(
    "--dispatch",
    type=PlugInChoice(DISPATCHERS, "reservation"),
    default="reservation",
    show_default=True,
    help="reactive: every pool for itself, without reservations.",
)
@click.option(
    "--load",
    "load_text",
    default="1.0",
    show_default=True,
    metavar="F|max",
    help="Load factor; max looks for the largest, from 1 down, that keeps 99 % within the SLO.",
)
@click.option(
    "--base-rps",
    type=click.Choice(("reference", "own")),
    default="reference",
    show_default=True,
    help="Load factor 1: each model's rate in the reference's plan, or weight x own objective.",
)
@click.option(
    "--arrivals",
    default="poisson",
    show_default=True,
    metavar="poisson|gamma:CV|onoff:ON_S:OFF_S|FILE",
    help="FILE: CSV with a column seconds or timestamp (arrivals), or seconds and rps (rates).",
)
@click.option("--duration", default=30.0, show_default=True, help="Seconds of arrivals.")
@click.option("--seed", default=1, show_default=True, help="Decides arrivals and noise.")
@click.option("--noise", default=0.0, help="Coefficient of variation of compute and transfers.")
@click.option(
    "--stragglers",
    default="0:3",
    show_default=True,
    metavar="PROBABILITY:FACTOR",
    help="How often a batch takes how many times as long.",
)
@click.option("--report-delay-ms", default=0.0, help="Until the scheduler hears of what happened.")
@click.option("--clock-error-ms", default=0.0, help="By how much the servers' clocks are wrong.")
@AS_JSON
@click.pass_context
def pools(
    context: click.Context,
    /,
    folder: Path | None,
    instance: str | None,
    load_text: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serves one instance of a data set of planning tasks, or runs scenario files.

    Example: catenaryd simulate pools --dataset tests/data/ppipe
    --instance maf19/0.3-0.33-0.37/G1/HC1-L --planner catenary --load 0.95 --arrivals gamma:2
    --duration 30 --seed 1 --json

    Example: catenaryd simulate pools scenarios/attainment.yaml --quick --json
    """
    if flags["schema"] or flags["scenarios"]:
        of_files = {each: flags[each] for each in _OF_FILES}
        context.invoke(plug_in(SIMULATIONS, "pools"), as_json=as_json, **of_files)
        return
    if folder is None or instance is None:
        raise click.UsageError("give --dataset and --instance, or scenario files")
    load = 1.0 if load_text == "max" else _number("load", load_text)
    dataset = load_dataset(folder)
    problem = dataset.problem(instance, flags["max_partitions"])
    if flags["planner"] == "catenary":
        problem = with_margin(problem, flags["margin"])
    plan = _plan(dataset, problem, instance, flags["planner"])
    options = SimulationOptions(
        base_rps=_base_rps(dataset, problem, plan, instance, flags["base_rps"]),
        load=load,
        duration_s=_positive("duration", flags["duration"]),
        seed=_at_least_zero("seed", flags["seed"]),
        arrivals=parse_arrivals(flags["arrivals"]),
        dispatcher=_dispatcher(flags["dispatch"]),
        disturbance=_disturbance(flags),
    )
    if load_text == "max":
        result = _at_largest(problem, plan, options)
    else:
        result = simulate(problem, plan, options)
    if as_json:
        facts = {
            "instance": instance,
            "planner": flags["planner"],
            "dispatch": flags["dispatch"],
            "objective": plan.objective,
            "duration_s": options.duration_s,
            "seed": options.seed,
        }
        click.echo(json.dumps({**facts, **result.to_json()}))
        return
    _print(result)


def _plan(
    dataset: PlanningDataset, problem: PoolingProblem, instance: str, name: str
) -> PooledPlan:
    if name == "catenary":
        return plan_pools(problem, clock=time.perf_counter)
    planner: PoolsPlanner = plug_in(PLANNERS, name)
    return planner(dataset, instance, problem, time.perf_counter)


def _base_rps(
    dataset: PlanningDataset, problem: PoolingProblem, plan: PooledPlan, instance: str, base: str
) -> dict[str, float]:
    if base == "reference":
        return reference_rates(dataset, instance)
    return {model.name: model.weight * plan.objective for model in problem.models}


def _dispatcher(name: str) -> DispatcherFactory:
    if name == "reservation":
        return PooledDispatcher
    found: DispatcherFactory = plug_in(DISPATCHERS, name)
    return found


def _disturbance(flags: dict[str, Any]) -> Disturbance:
    noise = _at_least_zero("noise", flags["noise"])
    probability, _, factor = str(flags["stragglers"]).partition(":")
    often = _number("stragglers", probability)
    if often > 1:
        raise InvalidInput("stragglers", "the probability must be 0 to 1")
    delay = _at_least_zero("report-delay-ms", flags["report_delay_ms"])
    error = _at_least_zero("clock-error-ms", flags["clock_error_ms"])
    return Disturbance(
        compute_cv=noise,
        transfer_cv=noise,
        straggler_probability=often,
        straggler_factor=_positive("stragglers", _number("stragglers", factor or "3")),
        report_delay_ns=round(delay * NANOSECONDS_PER_MILLISECOND),
        clock_error_ns=round(error * NANOSECONDS_PER_MILLISECOND),
    )


def _at_largest(
    problem: PoolingProblem, plan: PooledPlan, options: SimulationOptions
) -> SimulationResult:
    """Returns each model's figures at its largest load factor; the rest is that of the last run."""
    found = max_load_factor(problem, plan, options)
    models = tuple(found[model.name] for model in problem.models)
    least = min(model.load_factor for model in models)
    last = simulate(problem, plan, replace(options, load=least))
    return replace(last, models=models)


def _print(result: SimulationResult) -> None:
    click.echo(
        f"{'model':<18} {'load':>5} {'requests':>9} {'in time':>8} {'late':>6} {'dropped':>8}"
        f" {'attained':>9} {'p50 ms':>8} {'p99 ms':>8} {'batch':>6}"
    )
    for model in result.models:
        click.echo(_line(model))
    for name, share in result.utilisation.items():
        click.echo(f"{name}: {share:.1%} busy")
    if result.dispatch_us is not None:
        p50, p99 = result.dispatch_us
        click.echo(f"dispatch decision: p50 {p50:.1f} us, p99 {p99:.1f} us")
    click.echo(f"{result.events:,} events, {result.events_per_second:,.0f} per second")


def _line(model: ModelResult) -> str:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"

    return (
        f"{model.name:<18} {model.load_factor:>5.2f} {model.requests:>9} {model.finished:>8}"
        f" {model.late:>6} {model.dropped:>8} {model.attainment:>9.2%}"
        f" {number(model.p50_ms, 8, 2)} {number(model.p99_ms, 8, 2)}"
        f" {number(model.mean_batch, 6, 2)}"
    )


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidInput(field, f"{text!r} is not a number") from None
    return _at_least_zero(field, value)


def _at_least_zero(field: str, value: T) -> T:
    if not 0 <= value < float("inf"):
        raise InvalidInput(field, "must be 0 or more")
    return value


def _positive(field: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise InvalidInput(field, "must be more than 0")
    return value
