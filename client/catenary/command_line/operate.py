"""The commands that change the cluster or its plan: `deploy`, `plan` and `drain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from catenary.command_line.kit import CommandOptions, command, fail, print_json
from catenary.types import ModelDowntime, Replanned, as_json


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary deploy efficientnet-lite0 --slo-ms 200 --partitions 3")(
        deploy
    )
    app.command(epilog="Example: catenary drain agent-1")(drain)
    plans = typer.Typer(
        help="Show, explain or replace the plan in force.",
        epilog="Example: catenary plan show > plan.json && catenary plan apply plan.json",
        no_args_is_help=True,
    )
    plans.command("show", epilog="Example: catenary plan show > plan.json")(show_plan)
    plans.command("explain", epilog="Example: catenary plan explain")(explain_plan)
    plans.command("apply", epilog="Example: catenary plan apply plan.json")(apply_plan)
    plans.command("replan", epilog="Example: catenary plan replan")(replan)
    app.add_typer(plans, name="plan")


@command
def deploy(  # noqa: PLR0913, PLR0917 - one parameter an option
    options: CommandOptions,
    model: Annotated[str, typer.Argument(help="A model of the server's repository.")],
    version: Annotated[str, typer.Option(help="The latest if left out.")] = "",
    slo_ms: Annotated[float | None, typer.Option(help="Default SLO of its requests.")] = None,
    partitions: Annotated[int, typer.Option(min=0, help="Parts to cut it into; 0: any.")] = 0,
    max_batch: Annotated[int, typer.Option(min=0, help="Largest batch; 0: any.")] = 0,
    packing: Annotated[
        str,
        typer.Option(help="What sessions are moved for: pack, balance or off; empty: as usual."),
    ] = "",
) -> None:
    """Deploy a model and print the id of the plan that serves it."""
    with options.operator() as client:
        plan_id = client.deploy(
            model,
            version=version,
            slo_ms=slo_ms,
            partitions=partitions,
            max_batch=max_batch,
            packing=packing,
        )
    _print_plan_id(options, plan_id)


@command
def drain(
    options: CommandOptions, agent: Annotated[str, typer.Argument(help="Id of the agent.")]
) -> None:
    """Take an agent out of service: its running sessions move to other chains."""
    with options.operator() as client:
        drained = client.drain(agent)
    if options.as_json:
        print_json({"agent": agent, "drained": drained})
    elif drained:
        typer.echo(f"{agent} is drained")
    if not drained:
        fail(f"{agent} still has work; run the command again to wait for it")


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
        _print_plan_id(options, client.apply_plan(document))


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


def _print_plan_id(options: CommandOptions, plan_id: str) -> None:
    if options.as_json:
        print_json({"plan_id": plan_id})
    else:
        typer.echo(plan_id)
