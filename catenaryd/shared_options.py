"""Options, inputs and reports that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

from catenary_services.errors import InvalidInput
from catenary_services.settings import USUAL_REPOSITORY

MODEL_REPOSITORY = click.option(
    "--model-repository",
    type=click.Path(path_type=Path),
    default=USUAL_REPOSITORY,
    show_default=True,
    help="Folder with <model>/<version>/.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_progress(text: str) -> None:
    """Prints a step of long work on stderr."""
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
