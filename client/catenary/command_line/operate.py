"""The commands that change the cluster: `deploy` and `drain`."""

from __future__ import annotations

from typing import Annotated

import typer

from catenary.command_line.kit import CommandOptions, command, fail, print_json


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary deploy efficientnet-lite0 --slo-ms 200 --partitions 3")(
        deploy
    )
    app.command(epilog="Example: catenary drain agent-1")(drain)


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
    print_plan_id(options, plan_id)


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


def print_plan_id(options: CommandOptions, plan_id: str) -> None:
    if options.as_json:
        print_json({"plan_id": plan_id})
    else:
        typer.echo(plan_id)
