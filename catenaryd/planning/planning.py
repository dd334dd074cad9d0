"""The commands `catenaryd plan ...`: plans from files, printed as tables or as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from catenary_scheduler.planning.chains.problem import StopRule
from catenary_scheduler.planning.pooled import (
    LeastCost,
    LeastGpus,
    MaxThroughput,
    Objective,
    plan_pools,
)
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_scheduler.planning.pooled.explain import explain_limits
from catenary_scheduler.planning.pooled.planner import DEFAULT_TIME_LIMIT_S
from catenary_scheduler.planning.pooled.problem import PooledPartition, PooledPlan, PoolingProblem
from catenary_scheduler.planning.pooled.solving.solving import Solve, solve_by_free_rules
from catenary_services.errors import InvalidInput
from catenaryd.planning.planning_chains import chains_document, print_chains
from catenaryd.planning.planning_chains_input import read_chains_input
from catenaryd.planning.planning_dataset import dataset as dataset_command
from catenaryd.planning.planning_groups import groups
from catenaryd.plug_ins import PLANNERS, PLANNING_RULES, PlugInChoice, PoolsPlanner, plug_in
from catenaryd.shared_options import read_text


@click.group("plan")
def plan_group() -> None:
    """Makes plans from profiles and clusters in files, without touching a running cluster.

    Example: catenaryd plan pools --dataset tests/data/ppipe --instance maf19/0.3-0.33-0.37/G1/HC1-L
    """


plan_group.add_command(dataset_command)
plan_group.add_command(groups)


@plan_group.command()
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder with models.csv, block_timing.csv, cut_bytes.csv, clusters.json, instances.json.",
)
@click.option("--instance", "instance_id", required=True, help="Id in instances.json.")
@click.option(
    "--solver",
    type=click.Choice(["auto", "dp", "highs"]),
    default="auto",
    show_default=True,
    help="dp is exact and quick for some 200 GPUs; highs takes any cluster and reports its gap.",
)
@click.option(
    "--max-partitions",
    type=click.IntRange(min=1),
    help="Longest pipeline; default: 3, with the reference's rules as the instance says.",
)
@click.option(
    "--rules",
    type=PlugInChoice(PLANNING_RULES, "free"),
    default="free",
    show_default=True,
    help="Which plans count: our own rules, or those of PPipe's artifact.",
)
@click.option(
    "--planner",
    type=PlugInChoice(PLANNERS, "catenary"),
    default="catenary",
    show_default=True,
    help="Ours, or a baseline; reference: the data set's own plan.",
)
@click.option(
    "--objective",
    type=click.Choice(["throughput", "cost", "gpus"]),
    default="throughput",
    show_default=True,
    help="Most throughput, or least cost or fewest GPUs for the given --load.",
)
@click.option("--load", "loads", multiple=True, help="MODEL=REQUESTS_PER_SECOND; one per model.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIME_LIMIT_S,
    show_default=True,
    help="Seconds for the plan, or for the reason why there is none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def pools(
    dataset: Path, instance_id: str, max_partitions: int | None, as_json: bool, **options: Any
) -> None:
    """Plans pooled pipelines for an instance of a data set.

    Example: catenaryd plan pools --dataset tests/data/ppipe
    --instance maf19/0.3-0.33-0.37/G1/HC1-L --json
    """
    data = load_dataset(dataset)
    if max_partitions is None and options["rules"] == "reference":
        max_partitions = data.instance(instance_id).max_partitions
    problem = data.problem(instance_id, max_partitions)
    plan = _plan(data, instance_id, problem, options)
    if as_json:
        click.echo(json.dumps(pooled_plan_document(plan)))
    else:
        _print_table(problem, plan)


@plan_group.command()
@click.argument("file", type=click.Path(allow_dash=True, dir_okay=False, path_type=str))
@click.option(
    "--stop",
    type=click.Choice(["rate", "all"]),
    help="Until the rate is reached, as in Algorithm 1 (the default), or until all servers are "
    'used; counts before "stop" in the file.',
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def chains(file: str, stop: StopRule | None, as_json: bool) -> None:
    """Composes server chains for the servers and the load in FILE (- for standard input).

    FILE is one JSON object: servers [{memory, tau_c, tau_p}], L blocks, s_m and s_c (memory of a
    block and of a session's cache in it), lambda, rho_bar, and c; without c the best one is taken.

    Example: catenaryd plan chains servers.json --stop all --json
    """
    asked = read_chains_input(read_text(file), stop)
    document = chains_document(asked)
    if as_json:
        click.echo(json.dumps(document))
    else:
        print_chains(asked, document)


def _plan(
    data: PlanningDataset, instance: str, problem: PoolingProblem, options: dict[str, Any]
) -> PooledPlan:
    planner = options["planner"]
    objective = _objective(options["objective"], options["loads"])
    if planner != "catenary" and not isinstance(objective, MaxThroughput):
        raise click.UsageError(f"--planner {planner} has no other objective than throughput.")
    if planner != "catenary":
        other: PoolsPlanner = plug_in(PLANNERS, planner)
        return other(data, instance, problem, time.perf_counter)
    solve: Solve = solve_by_free_rules
    if options["rules"] != "free":
        solve = plug_in(PLANNING_RULES, options["rules"])
    return plan_pools(
        problem,
        solve=solve,
        solver=options["solver"],
        objective=objective,
        time_limit_s=options["time_limit"],
        clock=time.perf_counter,
    )


def _objective(name: str, loads: tuple[str, ...]) -> Objective:
    if name == "throughput":
        if loads:
            raise click.UsageError("--load is for --objective cost or gpus.")
        return MaxThroughput()
    rates = {}
    for load in loads:
        model, _, rate = load.partition("=")
        try:
            rates[model] = float(rate)
        except ValueError:
            raise InvalidInput("load", f"{load!r} is not MODEL=REQUESTS_PER_SECOND") from None
    return LeastCost(rates) if name == "cost" else LeastGpus(rates)


def pooled_plan_document(plan: PooledPlan) -> dict[str, Any]:
    """Returns the plan as `catenaryd plan pools --json` prints it."""
    return {
        "objective": plan.objective,
        "models": [
            {
                "name": model.name,
                "throughput_rps": model.throughput_rps,
                "pipelines": [
                    {
                        "batch": pipeline.batch,
                        "throughput_rps": pipeline.throughput_rps,
                        "latency_us": pipeline.latency_us,
                        "partitions": [_partition(part) for part in pipeline.partitions],
                    }
                    for pipeline in model.pipelines
                ],
            }
            for model in plan.models
        ],
        "solver": plan.solver,
        "optimal": plan.optimal,
        "bound": plan.bound,
        "seconds": plan.seconds,
    }


def _partition(part: PooledPartition) -> dict[str, Any]:
    whole = round(part.gpus)
    return {
        "gpu": part.gpu,
        "vgpus_per_gpu": part.level,
        "blocks": [part.first_block, part.last_block],
        "vgpus": part.vgpus,
        "gpus": whole if whole == part.gpus else part.gpus,
    }


def _print_table(problem: PoolingProblem, plan: PooledPlan) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "requests/s", "batch", "latency", "SLO", "partitions"):
        table.add_column(name, no_wrap=name != "partitions")
    slos = {model.name: model.slo_us / 1e3 for model in problem.models}
    for model in plan.models:
        for pipeline in model.pipelines:
            table.add_row(
                model.name,
                f"{pipeline.throughput_rps:.1f}",
                str(pipeline.batch),
                f"{pipeline.latency_us / 1e3:.1f} ms",
                f"{slos[model.name]:.1f} ms",
                "\n".join(_words(part) for part in pipeline.partitions),
            )
    console = Console(highlight=False)
    console.print(table)
    for line in explain_limits(problem, plan):
        console.print(line, soft_wrap=True)


def _words(part: PooledPartition) -> str:
    pool = f"{part.gpus:g} {part.gpu}"
    if part.level > 1:
        pool = f"{part.vgpus} of 1/{part.level} {part.gpu}"
    return f"{pool} (blocks {part.first_block}-{part.last_block - 1})"
