"""Options and reports that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import click

MODEL_REPOSITORY = click.option(
    "--model-repository",
    type=click.Path(path_type=Path),
    default=Path("models"),
    show_default=True,
    help="Folder with <model>/<version>/.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_progress(text: str) -> None:
    """Prints a step of long work to a terminal, and nothing in a pipe."""
    if sys.stderr.isatty():
        click.echo(f"{text} ..", err=True)
