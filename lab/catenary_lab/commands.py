"""The lab's additions to `catenaryd simulate`: scenario files, a command for each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from catenary_lab.scenarios.kinds import kind_named


def _command(name: str, live: str, text: str) -> click.Command:
    """Returns the command of one kind of scenario files.

    Args:
        name: Of the kind.
        live: Help of `--live`.
        text: Help of the command.
    """

    def run(
        scenarios: tuple[Path, ...], schema: bool, out: Path | None, as_json: bool, **form: Any
    ) -> None:
        from catenary_lab.scenarios.output import present, tell
        from catenary_lab.scenarios.runner import run_scenarios

        kind = kind_named(name)
        if schema:
            click.echo(json.dumps(kind.files.json_schema(), indent=2))
            return
        if not scenarios:
            raise click.UsageError("give scenario files, or --schema")
        reports = run_scenarios(kind, scenarios, progress=tell, **form)
        quick = form["quick"]
        present(reports, out, as_json=as_json, paths=scenarios, quick=quick)

    return click.Command(
        name,
        callback=run,
        help=text,
        params=[
            click.Argument(
                ["scenarios"], nargs=-1, type=click.Path(path_type=Path, dir_okay=False)
            ),
            click.Option(
                ["--schema"], is_flag=True, help="Print the JSON schema of scenario files."
            ),
            click.Option(["--quick"], is_flag=True, help="The short form of each scenario."),
            click.Option(["--live"], is_flag=True, help=live),
            click.Option(
                ["--out"],
                type=click.Path(path_type=Path, file_okay=False),
                help="Folder for plots and records.",
            ),
            click.Option(
                ["--workers"],
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="Simulations at a time; 0: one per CPU.",
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
        ],
    )


pools = _command(
    "pools",
    "Run scenarios that can on real processes as well.",
    "Serves pooled pipelines, by scenario files; `catenaryd simulate pools` asks it.",
)
chains = _command(
    "chains",
    "Serve on real processes, too, what has a `live` section: an emulated agent per server.",
    """Serves sessions over composed server chains, by scenario files; - reads standard input.

    Example: catenaryd simulate chains scenarios/chains/table-1.yaml --quick --json

    Example: catenaryd simulate chains scenarios/chains/table-1-live.yaml --live
    """,
)
placement = _command(
    "placement",
    "Start real agents, for scenarios of kind live: a real model under a load in steps.",
    """Places sessions on workers under objectives, by scenario files; - reads standard input.

    Example: catenaryd simulate placement scenarios/placement/lognormal.yaml --json

    Example: catenaryd simulate placement scenarios/placement/out-of-sample-13b.yaml --quick

    Example: catenaryd simulate placement scenarios/placement/live-steps.yaml --live --json
    """,
)
packing = _command(
    "packing",
    "Start real agents, for scenarios of kind live: running sessions of a real model move.",
    """Packs the caches of sessions onto few GPUs, by scenario files; - reads standard input.

    Example: catenaryd simulate packing scenarios/packing/packing-targets.yaml

    Example: catenaryd simulate packing scenarios/packing/packing-gpus.yaml --quick --json

    Example: catenaryd simulate packing scenarios/packing/packing-live.yaml --live --json
    """,
)
