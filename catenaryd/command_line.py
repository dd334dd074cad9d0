"""The commands of `catenaryd`. Errors are one sentence on stderr and exit code 1."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.groups import MOST_GROUPS
from catenary_services.domain.packing import PACKING_GOALS
from catenary_services.errors import CatenaryError
from catenary_services.lifecycle import Process, run_process
from catenary_services.log import configure_logging, get_logger
from catenary_services.settings import ProcessSettings, describe, load_settings
from catenaryd.commands.certificates import certs
from catenaryd.commands.importing import import_model
from catenaryd.commands.installing import InstallChoice, install_command, install_options
from catenaryd.commands.jail import show_jail
from catenaryd.commands.joining import join, leave
from catenaryd.commands.keys import create_key, list_keys, revoke_key
from catenaryd.commands.making_models import make_model
from catenaryd.commands.profiling import profile
from catenaryd.commands.redis_acl import redis_acl
from catenaryd.commands.repair import repair
from catenaryd.commands.tokens import token_group
from catenaryd.commands.verifying import verify_model
from catenaryd.enrolment.join_line import JOIN_PORT
from catenaryd.local.public_address import SCHEDULER_PORT
from catenaryd.local.supervisor import end_with_parent
from catenaryd.planning.planning import plan_group
from catenaryd.process_options import given, settings_options
from catenaryd.replay import replay_group
from catenaryd.shared_options import MODEL_REPOSITORY
from catenaryd.simulation.simulating import simulate_group

S = TypeVar("S", bound=ProcessSettings)

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True), help="catenary.yaml to read."
)
@click.option("--supervised", is_flag=True, hidden=True, help="End with the parent process.")
@click.pass_context
def cli(context: click.Context, config: Path | None, supervised: bool) -> None:
    """Runs Catenary: a whole local cluster (`up`), or one of its processes.

    Settings come from the file given with --config, then CATENARY_* variables, then flags.

    Example: catenaryd up --model efficientnet-lite0 --agents 3
    """
    if supervised:
        end_with_parent()
    context.obj = config


def _run(kind: str, settings: S, instance: str, make: Callable[[S], Process]) -> None:
    configure_logging(kind, instance, settings.log_level, settings.log_json)
    get_logger("catenaryd").info("settings", **describe(settings))
    sys.exit(run_process(make(settings), settings.drain_timeout_s))


@cli.command()
@settings_options(SchedulerSettings)
@click.pass_obj
def scheduler(config: Path | None, /, **flags: Any) -> None:
    """Runs a scheduler: plans, reserves, dispatches; leader or standby by a lease in Redis.

    Example: catenaryd scheduler --redis-url redis://127.0.0.1:6379 --model-repository models
    --models efficientnet-lite0 --insecure
    """
    from catenary_scheduler.process import SchedulerProcess

    settings = load_settings(
        SchedulerSettings, file=config, section="scheduler", flags=given(flags)
    )
    _run("scheduler", settings, settings.scheduler_id, SchedulerProcess)


@cli.command()
@settings_options(GatewaySettings)
@click.pass_obj
def gateway(config: Path | None, /, **flags: Any) -> None:
    """Runs a gateway: the Open Inference Protocol over gRPC and HTTP.

    Example: catenaryd gateway --scheduler-addresses 127.0.0.1:8004 --insecure
    """
    from catenary_gateway.process import GatewayProcess

    settings = load_settings(GatewaySettings, file=config, section="gateway", flags=given(flags))
    _run("gateway", settings, settings.gateway_id, GatewayProcess)


@cli.command()
@settings_options(AgentSettings)
@click.pass_obj
def agent(config: Path | None, /, **flags: Any) -> None:
    """Runs an agent: hosts partitions of models on one device.

    Example: catenaryd agent --agent-id agent-0 --device cuda:0 --model-repository models --insecure
    """
    from catenary_agent.process import AgentProcess

    settings = load_settings(AgentSettings, file=config, section="agent", flags=given(flags))
    _run("agent", settings, settings.agent_id, AgentProcess)


@cli.command()
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
@click.option("--model", "models", multiple=True, help="Model to serve; may be repeated.")
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
    from catenaryd.commands.up import options_of, public_options, run_up

    names = ("host", "advertise", "name", "scheduler_port", "authority", "tls")
    public = public_options(**{name: flags.pop(name) for name in names})
    options = options_of(config, **flags, **public)
    if install.wanted:
        install_command("catenary-up", "Catenary: a cluster and its host", install)
        return
    configure_logging("up", "local", "warning", False)
    sys.exit(asyncio.run(run_up(options, as_json=as_json, join_port=join_port)))


@cli.command()
@click.argument("model")
@MODEL_REPOSITORY
@click.option("--blocks", default=10, show_default=True, help="How many blocks to aim for.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def prepare(model: str, model_repository: Path, blocks: int, as_json: bool) -> None:
    """Cuts MODEL (name or name:version) into blocks and writes blocks.json beside it.

    Example: catenaryd prepare efficientnet-lite0 --model-repository models --blocks 10
    """
    from catenaryd.demo.models import find_model, prepare_table

    table = prepare_table(model_repository, find_model(model_repository, model), blocks)
    if as_json:
        click.echo(json.dumps(table))
        return
    for block in table["blocks"]:
        click.echo(
            f"block {block['index']:>3}  {block['compute_ms']:9.3f} ms"
            f"  {block['output_bytes_per_row']:>12,} bytes out per row"
        )


@cli.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".catenary/demo"),
    show_default=True,
    help="Models, logs and Redis data.",
)
@click.option("--keep", is_flag=True, help="Leave the cluster running until Ctrl-C.")
def demo(data_dir: Path, keep: bool) -> None:
    """Shows in a minute what the platform is for, on a cluster that it starts and stops.

    Example: catenaryd demo --keep
    """
    from catenaryd.demo.demo import run_demo

    configure_logging("demo", "local", "error", False)
    sys.exit(asyncio.run(run_demo(data_dir, keep=keep)))


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def health(arguments: tuple[str, ...]) -> None:
    """Asks a process of this machine whether it is live, ready or leader; for probes.

    Example: catenaryd health ready --address 127.0.0.1:8005
    """
    from catenaryd.health import main as ask

    sys.exit(ask(arguments))


cli.add_command(certs)
cli.add_command(create_key)
cli.add_command(join)
cli.add_command(leave)
cli.add_command(list_keys)
cli.add_command(revoke_key)
cli.add_command(import_model)
cli.add_command(make_model)
cli.add_command(plan_group)
cli.add_command(profile)
cli.add_command(show_jail)
cli.add_command(redis_acl)
cli.add_command(repair)
cli.add_command(replay_group)
cli.add_command(simulate_group)
cli.add_command(token_group)
cli.add_command(verify_model)


def main() -> None:
    """Runs the command line; the entry point of `catenaryd`."""
    configure_logging("command", "local", "warning", False)  # processes do it again
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except CatenaryError as error:
        click.echo(error.message, err=True)
        sys.exit(1)
