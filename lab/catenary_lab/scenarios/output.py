"""Presents the findings of scenarios of all kinds, as files, tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from catenary_lab.scenarios.document import update
from catenary_lab.scenarios.plots import draw
from catenary_lab.scenarios.record import made_now, record_of, settings_of, text_of
from catenary_lab.scenarios.report import Report

Settings = Mapping[str, Any]


def present(
    reports: Sequence[Report],
    document: str,
    out: Path | None,
    *,
    as_json: bool,
    paths: Sequence[Path],
    quick: bool,
) -> None:
    """Prints or writes reports.

    Args:
        reports: The reports, one per scenario.
        document: Name of the document their sections belong to.
        out: Folder for plots, records and the document; None: tables are printed.
        as_json: Whether to print facts instead of tables.
        paths: Files of the scenarios.
        quick: Whether their short forms were run.
    """
    if out is not None:
        settings = [settings_of(path, quick=quick) for path in paths]
        for path in write(reports, settings, out, document):
            tell(f"wrote {path}")
    if as_json:
        facts = [{"scenario": each.name, "title": each.title, **each.facts} for each in reports]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else {"scenarios": facts}))
    elif out is None:
        click.echo("\n\n".join(report.text() for report in reports))


def write(
    reports: Sequence[Report], settings: Sequence[Settings], folder: Path, document: str
) -> list[Path]:
    """Writes plots, records and the generated sections of a document; returns the files."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for report, of_run in zip(reports, settings, strict=True):
        written += [draw(figure, folder) for figure in report.figures]
        record = folder / f"{report.name}.json"
        record.write_text(text_of(record_of(report, of_run, made_now(), folder)), "utf-8")
        update(folder / document, report.name, report.markdown())
        written.append(record)
    return [*written, folder / document]


def tell(line: str) -> None:
    """Shows a line of progress on the terminal."""
    if sys.stderr.isatty():
        click.echo(line, err=True)
