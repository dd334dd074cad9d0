"""The application that all commands are registered with."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from catenary.command_line import (
    bench,
    bringing,
    chat,
    infer,
    look,
    machines,
    operate,
    plans,
    sessions,
)

app = typer.Typer(
    name="catenary",
    help="Use and operate a Catenary cluster.",
    epilog='Example: catenary infer efficientnet-lite0 --image cat.jpg --target "$HOST:8001"',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("catenary"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


for module in (look, machines, infer, chat, sessions, bringing, operate, plans, bench):
    module.register(app)
