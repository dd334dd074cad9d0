"""The command `catenaryd up`: a local cluster until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from catenary_services.domain.groups import MOST_GROUPS
from catenary_services.domain.packing import PACKING_GOALS
from catenary_services.log import configure_logging
from catenaryd.commands.installing import InstallChoice, install_command, install_options
from catenaryd.enrolment.join_line import JOIN_PORT
from catenaryd.local.public_address import SCHEDULER_PORT
from catenaryd.running import options_of, public_options, run_up


@click.command()
@click.option(
    "--agents", type=int, help="How many agents to start.  [default: 3, or one per --device]"
)
@click.option(
    "--max-agents",
    default=0,
    show_default=True,
    help="Start up to so many as load grows, and stop those not needed; 0: always --agents.",
)
@click.option(
    "--packing",
    type=click.Choice(PACKING_GOALS),
    default=None,
    help="What running sessions of models that do not say are moved for: onto few chains, evenly, "
    "or not at all. Usual: pack with --max-agents, else off.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    default=("cpu",),
    show_default=True,
    help="cpu, cuda or emulated:CLASS; given several times: one agent for each.",
)
@click.option(
    "--virtual-gpus",
    default=1,
    show_default=True,
    help="So many agents share a device: --agents 4 --virtual-gpus 2 is two devices.",
)
@click.option(
    "--schedulers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many schedulers to start; those that lead no group stand by.",
)
@click.option(
    "--groups",
    type=click.IntRange(1, MOST_GROUPS),
    default=1,
    show_default=True,
    help="Scheduler groups the agents are dealt out to, each led by one scheduler.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Model to serve, by its name or its source (hf:ORGANISATION/NAME, a URL, a file or "
    "folder: catenaryd pull); may be repeated.",
)
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path, exists=True), help="Placement to use."
)
@click.option("--grpc-port", default=8001, show_default=True, help="0 takes a free one.")
@click.option("--http-port", default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--admin-port",
    type=int,
    help="0 takes a free one.  [default: 8003, or a free one if --grpc-port is 0]",
)
@click.option(
    "--metrics-port",
    type=int,
    help="Port of the gateway's /metrics.  [default: 8002, or a free one if --grpc-port is 0]",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".catenary"),
    show_default=True,
    help="Models, logs and Redis data.",
)
@click.option("--redis-url", help="Use this Redis instead of starting one.")
@click.option(
    "--tls",
    is_flag=True,
    help="Mutual TLS between the processes, with certificates made in the data directory.",
)
@click.option(
    "--host",
    help="Let other machines join (catenaryd join): the address they reach this one at, or 0.0.0.0 "
    "or :: for all. Implies --tls; ports for clients stay on loopback.",
)
@click.option(
    "--advertise",
    help="Address that other machines are told.  [default: --host, or that of the default route]",
)
@click.option("--name", help="This machine's name among those that join.  [default: host name]")
@click.option(
    "--scheduler-port",
    default=SCHEDULER_PORT,
    show_default=True,
    help="With --host: port of the first scheduler, which takes control streams 3 above; each "
    "further one is 10 above.",
)
@click.option(
    "--join-port",
    default=JOIN_PORT,
    show_default=True,
    help="With --host: port that machines join at.",
)
@click.option(
    "--authority",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of your own authority (catenaryd certs), instead of one in the data directory.",
)
@install_options
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON line.")
@click.pass_obj
def up(
    config: Path | None, /, as_json: bool, join_port: int, install: InstallChoice, **flags: Any
) -> None:
    """Runs a whole cluster on this machine until Ctrl-C, restarting whatever dies.

    Prints one line once everything is ready. With --max-agents the cluster has as many agents as
    the load of its models that generate text needs, --agents at least.

    Example: catenaryd up --agents 3 --model efficientnet-lite0 --json
    """
    names = ("host", "advertise", "name", "scheduler_port", "authority", "tls")
    public = public_options(**{name: flags.pop(name) for name in names})
    options = options_of(config, **flags, **public)
    if install.wanted:
        install_command("catenary-up", "Catenary: a cluster and its host", install)
        return
    configure_logging("up", "local", "warning", False)
    sys.exit(asyncio.run(run_up(options, as_json=as_json, join_port=join_port)))
