"""`catenaryd simulate pools SCENARIO.yaml ...`: progress and output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from catenary_lab.scenarios.output import present, tell
from catenary_lab.scenarios.pools.runs import DOCUMENT, Form, run_scenarios
from catenary_lab.scenarios.pools.schema import json_schema


def run_command(flags: Mapping[str, Any], *, as_json: bool) -> None:
    """Runs scenario files and prints or writes what they found; or prints their schema.

    Args:
        flags: What `scenario_options` gives.
        as_json: Print facts instead of tables.
    """
    if flags["schema"]:
        click.echo(json.dumps(json_schema(), indent=2))
        return
    form = Form(flags["quick"], flags["live"], flags["workers"])
    reports = run_scenarios(flags["scenarios"], form, tell)
    present(
        reports,
        DOCUMENT,
        flags["out"],
        as_json=as_json,
        paths=flags["scenarios"],
        quick=flags["quick"],
    )
