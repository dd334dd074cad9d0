"""`catenaryd simulate KIND SCENARIO.yaml ...`: what all kinds of scenario files have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from catenary_lab.scenarios.output import present, tell
from catenary_lab.scenarios.report import Report


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scenario files."""

    document: str
    """Of the results."""
    json_schema: Callable[[], dict[str, Any]]
    run_scenarios: Callable[..., list[Report]]
    """Takes paths, and by name `quick`, `workers`, `live` and `progress`."""


def run_command(
    kind: Kind,
    paths: tuple[Path, ...],
    *,
    schema: bool,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Runs scenario files and prints or writes what they found.

    Args:
        kind: Their kind.
        paths: The files.
        schema: Print the JSON schema of such files instead.
        out: Folder for plots, facts and the document; None: tables are printed.
        as_json: Print facts instead of tables.
        **options: For `run_scenarios`.
    """
    if schema:
        click.echo(json.dumps(kind.json_schema(), indent=2))
        return
    if not paths:
        raise click.UsageError("give scenario files, or --schema")
    reports = kind.run_scenarios(paths, progress=tell, **options)
    quick = options["quick"]
    present(reports, kind.document, out, as_json=as_json, paths=paths, quick=quick)
