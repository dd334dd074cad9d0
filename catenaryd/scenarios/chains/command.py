"""`catenaryd simulate chains SCENARIO.yaml ...`: progress and output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from catenaryd.scenarios.chains.runs import run_scenarios, write
from catenaryd.scenarios.chains.schema import json_schema


def print_schema() -> None:
    """Prints the JSON schema of scenario files."""
    click.echo(json.dumps(json_schema(), indent=2))


def run_command(
    paths: tuple[Path, ...],
    *,
    quick: bool,
    workers: int,
    live: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Runs scenario files and prints or writes what they found.

    Args:
        paths: The files.
        quick: Their short forms.
        workers: Simulations at a time; 0: one per CPU.
        live: Serve on real processes, too, what has a `live` section.
        out: Folder for plots, facts and the document; None: tables are printed.
        as_json: Print facts instead of tables.
    """
    reports = run_scenarios(paths, quick=quick, workers=workers, live=live, progress=_progress)
    if out is not None:
        for path in write(reports, out):
            _progress(f"wrote {path}")
    if as_json:
        facts = [{"scenario": each.name, "title": each.title, **each.facts} for each in reports]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else {"scenarios": facts}))
    elif out is None:
        click.echo("\n\n".join(report.text() for report in reports))


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(line, err=True)
