"""The commands about plans: what would serve a model, and the plan in force."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from catenary.command_line.bringing import print_plan_id
from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.rpc.plan_search import PlannedChain, PlannedPipeline, PlanOption, PlanSearch
from catenary.types import ModelDowntime, Replanned, as_json

_COLUMNS = ("OPTION", "PER SECOND", "TOKENS/S", "LATENCY", "FIRST", "NEXT", "GPUS", "WHY NOT")


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    plans = typer.Typer(no_args_is_help=True)
    plans.callback(
        invoke_without_command=True,
        epilog="Example: catenary plan --model smollm2-135m --gpus L4=1 --gpus P4=2",
    )(search_plan)
    plans.command("show", epilog="Example: catenary plan show > plan.json")(show_plan)
    plans.command("explain", epilog="Example: catenary plan explain")(explain_plan)
    plans.command("apply", epilog="Example: catenary plan apply plan.json")(apply_plan)
    plans.command("replan", epilog="Example: catenary plan replan")(replan)
    app.add_typer(plans, name="plan")


@command
def search_plan(  # noqa: PLR0913, PLR0917 - one parameter an option
    options: CommandOptions,
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A model of the server's repository.")] = "",
    gpus: Annotated[
        list[str],
        typer.Option(
            metavar="CLASS=COUNT", help="Devices of one class; may be given several times."
        ),
    ] = [],  # noqa: B006 - typer copies it
    version: Annotated[str, typer.Option(help="The latest if left out.")] = "",
    objective: Annotated[
        str, typer.Option(help="What decides: throughput, or gpus for the fewest.")
    ] = "throughput",
    rate: Annotated[
        float, typer.Option(min=0, help="Requests or sessions per second; 0: as now.")
    ] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Of a mean prompt; 0: as now.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=0, help="Of a mean answer; 0: as now.")] = 0,
) -> None:
    """Find the best way to serve a model on given devices, or show and change the plan in force.

    The devices need not be there. Nothing changes in the cluster.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    if not model or not gpus:
        fail("name a model with --model and devices with --gpus CLASS=COUNT", 2)
    with options.operator() as client:
        found = client.search_plan(
            model,
            _counts(gpus),
            version=version,
            objective=objective,
            rate_per_s=rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )
    if options.as_json:
        print_json(found)
    else:
        console().print(Group(*_pages(found)))


def _refuse_options(context: typer.Context) -> None:
    """Refuses options in front of a sub-command, which would not hear of them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            fail(f"{parameter.opts[0]} goes behind `plan {context.invoked_subcommand}`", 2)


def _counts(gpus: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in gpus:
        name, _, count = each.rpartition("=")
        if not name or not count.isdecimal() or not int(count):
            fail(f"--gpus {each!r} is not CLASS=COUNT", 2)
        if name in counts:
            fail(f"--gpus names {name} twice", 2)
        counts[name] = int(count)
    return counts


def _pages(found: PlanSearch) -> Iterator[Any]:
    chosen = found.chosen
    yield Text(f"{found.model}:{found.version}: {chosen.shape}")
    if chosen.predicted:
        attained = f"{chosen.attainment_ratio:.0%} of the load within the objectives"
        survives = "survives" if chosen.survives else "does not survive"
        yield Text(f"  {attained}; {survives} the loss of any one GPU; what binds: {chosen.binds}")
    for pipeline in chosen.pipelines:
        yield Text(f"  {_pipeline(pipeline)}")
    for chain in chosen.chains:
        yield Text(f"  {_chain(chain)}")
    yield Text()
    yield table(_COLUMNS, [_row(option) for option in found.options])
    if found.idle:
        yield Text()
    for idle in found.idle:
        yield Text(f"{idle.gpu} is idle: {idle.why}")
    yield Text()
    for note in found.notes:
        yield Text(f"Note: {note}.")


def _row(option: PlanOption) -> tuple[str, ...]:
    why = option.why_not or "chosen"
    if not option.predicted:
        return (option.shape, *["-"] * 6, why)
    speaks = option.tokens_per_s > 0
    return (
        option.shape,
        f"{option.throughput_per_s:.3g}",
        f"{option.tokens_per_s:.3g}" if speaks else "-",
        _time(option.latency_ns),
        _time(option.first_token_ns) if speaks else "-",
        _time(option.per_token_ns) if speaks else "-",
        str(option.gpus),
        why,
    )


def _time(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.2f} s" if duration_ns >= 1e9 else f"{duration_ns / 1e6:.3g} ms"


def _pipeline(pipeline: PlannedPipeline) -> str:
    path = ", then ".join(
        f"blocks {pool.first_block} to {pool.last_block - 1} on {' or '.join(pool.agent_ids)}"
        for pool in pipeline.stages
    )
    return f"batches of up to {pipeline.batch}: {path}"


def _chain(chain: PlannedChain) -> str:
    role = {"prefill": " for prompts", "decode": " for what follows them"}.get(chain.role, "")
    path = ", then ".join(
        f"blocks {hop.first_block} to {hop.last_block - 1} on {hop.agent_id}" for hop in chain.hops
    )
    return f"{chain.capacity} session(s) at a time{role}: {path}"


@command
def show_plan(options: CommandOptions) -> None:
    """Print the plan in force and the last change of plan, in the form `plan apply` reads."""
    with options.client() as client:
        plan = client.plan()
    document = dict(plan.document)
    if plan.last_switch is not None:
        document["last_switch"] = as_json(plan.last_switch)
    typer.echo(json.dumps(document, indent=None if options.as_json else 2))


@command
def explain_plan(options: CommandOptions) -> None:
    """Print why the plan looks as it does and what it promises."""
    with options.client() as client:
        plan = client.plan()
    if options.as_json:
        print_json({"explanation": plan.explanation})
    else:
        typer.echo(plan.explanation or "No plan is in force.")


@command
def apply_plan(
    options: CommandOptions,
    file: Annotated[str, typer.Argument(help="A plan as JSON; - reads standard input.")],
) -> None:
    """Put a plan in force and print its id."""
    document = _read_plan(file)
    with options.operator() as client:
        print_plan_id(options, client.apply_plan(document))


@command
def replan(options: CommandOptions) -> None:
    """Plan anew, in place of any plan applied by hand, and print what came of it."""
    with options.operator() as client:
        found = client.replan()
    if options.as_json:
        print_json(found)
    elif not found.changed:
        typer.echo(f"{found.plan_id} stays in force: nothing better was found")
    else:
        downtime_ms = max((m.downtime_ns / 1e6 for m in _downtime(found)), default=0.0)
        typer.echo(f"{found.plan_id} is in force; the longest pause was {downtime_ms:.0f} ms")


def _downtime(found: Replanned) -> tuple[ModelDowntime, ...]:
    return found.switch.downtime if found.switch is not None else ()


def _read_plan(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", 2)
    except ValueError as error:
        fail(f"{file} is no JSON: {error}", 2)
    if not isinstance(document, dict):
        fail(f"{file} holds no JSON object", 2)
    return document
