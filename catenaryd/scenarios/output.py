"""What scenarios found, for people and programs: files, tables or JSON. All kinds share it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from catenaryd.scenarios.document import update
from catenaryd.scenarios.plots import draw
from catenaryd.scenarios.report import Report


def present(reports: Sequence[Report], document: str, out: Path | None, *, as_json: bool) -> None:
    """Prints or writes reports.

    Args:
        reports: One per scenario.
        document: Name of the document their sections belong to.
        out: Folder for plots, facts and the document; None: tables are printed.
        as_json: Print facts instead of tables.
    """
    if out is not None:
        for path in write(reports, out, document):
            tell(f"wrote {path}")
    if as_json:
        facts = [{"scenario": each.name, "title": each.title, **each.facts} for each in reports]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else {"scenarios": facts}))
    elif out is None:
        click.echo("\n\n".join(report.text() for report in reports))


def write(reports: Sequence[Report], folder: Path, document: str) -> list[Path]:
    """Writes plots, facts and the generated sections of a document; returns the files."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        written += [draw(figure, folder) for figure in report.figures]
        facts = folder / f"{report.name}.json"
        facts.write_text(json.dumps(report.facts, indent=1) + "\n", "utf-8")
        update(folder / document, report.name, report.markdown())
        written.append(facts)
    return [*written, folder / document]


def tell(line: str) -> None:
    """Shows progress to whoever sits at a terminal."""
    if sys.stderr.isatty():
        click.echo(line, err=True)
