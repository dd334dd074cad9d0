"""What the lab adds to `catenaryd simulate`: scenario files, a command for each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from catenary_lab.scenarios.kinds import Kind, run_command


def _command(
    name: str, document: str, live: str, text: str, run: Callable[..., None]
) -> click.Command:
    """Returns the command of one kind of scenario files.

    Args:
        name: Of the kind.
        document: Of the results.
        live: Help of `--live`.
        text: Help of the command.
        run: Takes the files and the options.
    """
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
                help=f"Folder for plots, facts and the tables in {document}.",
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


def _run_pools(scenarios: tuple[Path, ...], **flags: Any) -> None:
    from catenary_lab.scenarios.command import run_command as run_pools

    run_pools({"scenarios": scenarios, **flags}, as_json=flags["as_json"])


def _run_chains(scenarios: tuple[Path, ...], **flags: Any) -> None:
    from catenary_lab.scenarios.chains.runs import DOCUMENT, run_scenarios
    from catenary_lab.scenarios.chains.schema import json_schema

    run_command(Kind(DOCUMENT, json_schema, run_scenarios), scenarios, **flags)


def _run_placement(scenarios: tuple[Path, ...], **flags: Any) -> None:
    from catenary_lab.scenarios.placement.runs import DOCUMENT, run_scenarios
    from catenary_lab.scenarios.placement.schema import json_schema

    run_command(Kind(DOCUMENT, json_schema, run_scenarios), scenarios, **flags)


def _run_packing(scenarios: tuple[Path, ...], **flags: Any) -> None:
    from catenary_lab.scenarios.packing.runs import DOCUMENT, run_scenarios
    from catenary_lab.scenarios.packing.schema import json_schema

    run_command(Kind(DOCUMENT, json_schema, run_scenarios), scenarios, **flags)


pools = _command(
    "pools",
    "pooled-pipelines.md",
    "Run scenarios that can on real processes as well.",
    "Serves pooled pipelines, by scenario files; `catenaryd simulate pools` asks it.",
    _run_pools,
)
chains = _command(
    "chains",
    "server-chains.md",
    "Serve on real processes, too, what has a `live` section: an emulated agent per server.",
    """Serves sessions over composed server chains, by scenario files; - reads standard input.

    Example: catenaryd simulate chains scenarios/chains/table-1.yaml --quick --json

    Example: catenaryd simulate chains scenarios/chains/table-1-live.yaml --live
    """,
    _run_chains,
)
placement = _command(
    "placement",
    "slo-placement.md",
    "Start real agents, for scenarios of kind live: a real model under a load in steps.",
    """Places sessions on workers under objectives, by scenario files; - reads standard input.

    Example: catenaryd simulate placement scenarios/placement/lognormal.yaml --json

    Example: catenaryd simulate placement scenarios/placement/out-of-sample-13b.yaml --quick

    Example: catenaryd simulate placement scenarios/placement/live-steps.yaml --live --json
    """,
    _run_placement,
)
packing = _command(
    "packing",
    "kv-packing.md",
    "Start real agents, for scenarios of kind live: running sessions of a real model move.",
    """Packs the caches of sessions onto few GPUs, by scenario files; - reads standard input.

    Example: catenaryd simulate packing scenarios/packing/packing-targets.yaml

    Example: catenaryd simulate packing scenarios/packing/packing-gpus.yaml --quick --json

    Example: catenaryd simulate packing scenarios/packing/packing-live.yaml --live --json
    """,
    _run_packing,
)
