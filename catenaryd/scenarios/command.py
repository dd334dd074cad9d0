"""`catenaryd simulate pools SCENARIO.yaml ...`: progress and output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from catenaryd.scenarios.report import Report
from catenaryd.scenarios.runs import Form, run_scenarios, write
from catenaryd.scenarios.schema import json_schema


def run_command(flags: Mapping[str, Any], *, as_json: bool) -> None:
    """Runs scenario files and prints or writes what they found; or prints their schema.

    Args:
        flags: What `scenario_options` gives.
        as_json: Print facts instead of tables.
    """
    if flags["schema"]:
        click.echo(json.dumps(json_schema(), indent=2))
        return
    out: Path | None = flags["out"]
    form = Form(flags["quick"], flags["live"], flags["workers"])
    reports = run_scenarios(flags["scenarios"], form, _progress)
    if out is not None:
        for path in write(reports, out):
            _progress(f"wrote {path}")
    if as_json:
        facts = [{"scenario": each.name, "title": each.title, **each.facts} for each in reports]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else {"scenarios": facts}))
    elif out is None:
        click.echo("\n\n".join(_text(report) for report in reports))


def _text(report: Report) -> str:
    tables = [table.markdown() for table in report.tables]
    return "\n\n".join([f"# {report.title}", *tables, *report.notes])


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(line, err=True)
