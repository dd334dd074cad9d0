"""Presents the findings of scenarios of all kinds, as files, tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from catenary_lab.limits import table
from catenary_lab.scenarios.figures import judged
from catenary_lab.scenarios.plots import draw
from catenary_lab.scenarios.record import made_now, record_of, settings_of, text_of
from catenary_lab.scenarios.report import Report

Settings = Mapping[str, Any]


def present(
    reports: Sequence[Report],
    out: Path | None,
    *,
    as_json: bool,
    paths: Sequence[Path],
    quick: bool,
) -> None:
    """Prints or writes reports, and prints what was expected of them.

    Args:
        reports: The reports, one per scenario.
        out: Folder for plots and records; None: tables are printed.
        as_json: Whether to print facts instead of tables.
        paths: Files of the scenarios.
        quick: Whether their short forms were run.
    """
    if out is not None:
        settings = [settings_of(path, quick=quick) for path in paths]
        for path in write(reports, settings, out):
            tell(f"wrote {path}")
    if as_json:
        facts = [{"scenario": each.name, "title": each.title, **each.facts} for each in reports]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else {"scenarios": facts}))
    elif out is None:
        click.echo("\n\n".join(report.text() for report in reports))
    for each in reports:
        if each.expect:
            figures = judged(each.expect, each.tables, each.facts)
            click.echo(f"\n{each.name}\n{table(figures)}", err=as_json)


def write(reports: Sequence[Report], settings: Sequence[Settings], folder: Path) -> list[Path]:
    """Writes plots and records; returns the files."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for report, of_run in zip(reports, settings, strict=True):
        written += [draw(figure, folder) for figure in report.figures]
        record = folder / f"{report.name}.json"
        record.write_text(text_of(record_of(report, of_run, made_now(), folder)), "utf-8")
        written.append(record)
    return written


def tell(line: str) -> None:
    """Shows a line of progress on the terminal."""
    if sys.stderr.isatty():
        click.echo(line, err=True)
