"""The options of `catenaryd simulate pools` for scenario files; imports nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_DECORATORS = (
    click.argument("scenarios", nargs=-1, type=click.Path(path_type=Path, dir_okay=False)),
    click.option("--schema", is_flag=True, help="Print the JSON schema of scenario files."),
    click.option(
        "--live", is_flag=True, help="Run scenarios that can on real processes as well."
    ),
    click.option("--quick", is_flag=True, help="The short form of each scenario."),
    click.option(
        "--out", type=click.Path(path_type=Path, file_okay=False),
        help="Folder for plots, facts and the tables in pooled-pipelines.md.",
    ),
    click.option(
        "--workers", type=click.IntRange(0), default=0,
        help="Simulations at a time; 0: one per CPU.",
    ),
)  # fmt: skip


def scenario_options(function: F) -> F:
    """Adds the argument and the options of scenario files to a command."""
    for decorate in reversed(_DECORATORS):
        function = decorate(function)
    return function
