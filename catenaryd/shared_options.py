"""Options, inputs and reports that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from catenary_services.errors import InvalidInput

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


def read_text(file: str) -> str:
    """Returns the text of a file; of standard input for `-`.

    Raises:
        InvalidInput: The file cannot be read, or is not UTF-8 text.
    """
    try:
        with click.open_file(file, encoding="utf-8") as stream:
            return str(stream.read())
    except OSError as error:
        raise InvalidInput("file", f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput("file", f"{file} is not UTF-8 text") from None
