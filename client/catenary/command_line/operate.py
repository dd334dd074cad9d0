"""The commands about agents: `drain` and `undrain`."""

from __future__ import annotations

from typing import Annotated

import typer

from catenary.command_line.kit import CommandOptions, command, fail, print_json


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary drain agent-1")(drain)
    app.command(epilog="Example: catenary undrain agent-1")(undrain)


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
def undrain(
    options: CommandOptions, agent: Annotated[str, typer.Argument(help="Id of the agent.")]
) -> None:
    """Use an agent again that was drained; the next plan has it."""
    with options.operator() as client:
        client.undrain(agent)
    if options.as_json:
        print_json({"agent": agent, "drained": False})
    else:
        typer.echo(f"{agent} is used again")
