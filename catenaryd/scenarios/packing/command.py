"""`catenaryd simulate packing SCENARIO.yaml ...`: progress and output."""

from __future__ import annotations

import json
from pathlib import Path

import click

from catenaryd.scenarios.output import present, tell
from catenaryd.scenarios.packing.runs import DOCUMENT, run_scenarios
from catenaryd.scenarios.packing.schema import json_schema


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
        live: Start real processes for scenarios of kind live.
        out: Folder for plots, facts and the document; None: tables are printed.
        as_json: Print facts instead of tables.
    """
    reports = run_scenarios(paths, quick=quick, workers=workers, live=live, progress=tell)
    present(reports, DOCUMENT, out, as_json=as_json)
