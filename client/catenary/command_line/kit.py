"""Parts that all commands share: connection options, errors and output."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from catenary.async_client import AsyncClient
from catenary.client import Client
from catenary.errors import CatenaryError, InvalidInputError
from catenary.rpc.connection import DEFAULT_TARGET, TlsConfig
from catenary.types import as_json

BAD_USAGE = 2
_PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """The options that every command has."""

    target: Annotated[
        str, typer.Option(envvar="CATENARY_TARGET", help="The gateway, host:port.")
    ] = DEFAULT_TARGET
    admin: Annotated[
        str | None,
        typer.Option(
            envvar="CATENARY_ADMIN_TARGET",
            help="The admin port, host:port; port 8003 of the target's host by default.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CATENARY_API_KEY", show_envvar=True, help="Who you are."),
    ] = None
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS, trusting the system's CAs.")] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="CATENARY_TLS_CA", help="Use TLS, trusting this PEM file."),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Own certificate (PEM), for servers that ask for one.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain connections to other machines.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print facts as JSON.")] = False

    def client(self) -> Client:
        """Returns a blocking client with these options."""
        return Client(self.target, **self._settings())

    def operator(self) -> Client:
        """Returns a client for a command that may take minutes, once its gateway has answered.

        Raises:
            CatenaryError: The gateway does not answer, which is reported now and not after minutes.
        """
        client = self.client()
        try:
            client.requests(limit=1)
        except BaseException:
            client.close()
            raise
        return client

    def async_client(self) -> AsyncClient:
        """Returns an asyncio client with these options."""
        return AsyncClient(self.target, **self._settings())

    def _settings(self) -> dict[str, Any]:
        tls = None
        if self.tls or self.tls_ca is not None or self.tls_cert is not None:
            tls = TlsConfig(self.tls_ca, self.tls_cert, self.tls_key)
        return {
            "api_key": self.api_key or None,
            "tls": tls,
            "insecure": self.insecure,
            "admin_target": self.admin or None,
        }


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command whose first parameter is `options: CommandOptions`.

    The options become keyword parameters of the signature that typer reads.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "options"]
    hints = inspect.get_annotations(CommandOptions, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(item.name, keyword, default=item.default, annotation=hints[item.name])
        for item in fields(CommandOptions)
    ]

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        options = CommandOptions(
            **{item.name: arguments.pop(item.name) for item in fields(CommandOptions)}
        )
        try:
            function(options, **arguments)
        except CatenaryError as error:
            # An error found before anything was sent has no gRPC code: it is the user's own input.
            usage = isinstance(error, InvalidInputError) and not error.code
            fail(_explain(error), BAD_USAGE if usage else 1)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(p.replace(kind=keyword) for p in own), *shared]
    )
    run.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
    return run


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints one sentence to stderr and ends the command."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def _explain(error: CatenaryError) -> str:
    advice = ""
    if error.retry_after_s is not None:
        advice = f" (try again in {error.retry_after_s:.3g} s)"
    return f"{error.message}{advice} [{error.reason}]"


def print_json(value: Any) -> None:
    """Prints dataclasses or plain values as one JSON document."""
    typer.echo(json.dumps(as_json(value), allow_nan=False))


def console() -> Console:
    """Returns a console for stdout, with colours on a terminal, plain and wide in a pipe."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_PLAIN_WIDTH, color_system=None)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> Table:
    """Returns a table without lines around cells, with numbers aligned to the right."""
    made = Table(box=None, title=title or None, title_justify="left", pad_edge=False)
    cells = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(row[index][1] for row in cells)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        made.add_row(*(text for text, _ in row))
    return made


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, float):
        return f"{value:.2f}", True
    return escape(str(value)), isinstance(value, int)
