"""The commands of `catenaryd`. Errors are one sentence on stderr and exit code 1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import shell_complete

from catenary_services.errors import CatenaryError
from catenary_services.version import software_version
from catenaryd.lazy_group import LazyCommand, LazyGroup

NAME, _COMPLETION = "catenaryd", "_CATENARYD_COMPLETE"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

LAZY_COMMANDS = {  # a test compares the help with that of the commands
    "agent": LazyCommand(
        "catenaryd.processes:agent", "Runs an agent: hosts partitions of models on one device."
    ),
    "authority": LazyCommand(
        "catenaryd.enrolment.authority_command:authority",
        "Certifies the processes of a cluster in containers, which enrol by the token of their"
        " role.",
    ),
    "certs": LazyCommand(
        "catenaryd.commands.certificates:certs",
        "Makes an authority (ca.pem, ca-key.pem) and certificates with an identity per role.",
    ),
    "create-key": LazyCommand(
        "catenaryd.commands.keys:create_key",
        "Creates an API key called NAME, prints it once and stores only its hash.",
    ),
    "demo": LazyCommand(
        "catenaryd.demo.demo:demo",
        "Shows in a minute what the platform is for, on a cluster that it starts and stops.",
    ),
    "enrol": LazyCommand(
        "catenaryd.machines.enrol_command:enrol",
        "Gets a certificate for the process NAME of a ROLE, then runs COMMAND and renews it"
        " meanwhile.",
    ),
    "gateway": LazyCommand(
        "catenaryd.processes:gateway",
        "Runs a gateway: the Open Inference Protocol over gRPC and HTTP.",
    ),
    "import-model": LazyCommand(
        "catenaryd.commands.importing:import_model",
        "Imports the language model at SOURCE under a name of your own, and prints its sizes.",
    ),
    "jail": LazyCommand(
        "catenaryd.commands.jail:show_jail",
        "Says what confines a process that reads a model file on this machine.",
    ),
    "join": LazyCommand(
        "catenaryd.commands.joining:join",
        'Joins the cluster of JOIN_LINE, as `catenaryd up --host` printed it; "-" reads it.',
    ),
    "leave": LazyCommand(
        "catenaryd.commands.joining:leave",
        "Drains this machine's agents, ends them, and forgets its certificates.",
    ),
    "list-keys": LazyCommand(
        "catenaryd.commands.keys:list_keys",
        "Lists the keys of a file: names, scopes, limits and the beginnings of their hashes.",
    ),
    "make-model": LazyCommand(
        "catenaryd.commands.making_models:make_model",
        "Makes a model with random weights in FOLDER, as published models come, for benches.",
    ),
    "plan": LazyCommand(
        "catenaryd.planning.planning:plan_group",
        "Makes plans from profiles and clusters in files, without touching a running cluster.",
    ),
    "prepare": LazyCommand(
        "catenaryd.commands.profiling:prepare",
        "Cuts MODEL (name or name:version) into blocks and writes blocks.json beside it.",
    ),
    "profile": LazyCommand(
        "catenaryd.commands.profiling:profile",
        "Measures every block of MODEL (name or name:version) and writes profile.json beside it.",
    ),
    "pull": LazyCommand(
        "catenaryd.commands.importing:pull",
        "Fetches the model at SOURCE and imports it into the repository of this machine.",
    ),
    "redis-acl": LazyCommand(
        "catenaryd.commands.redis_acl:redis_acl",
        "Prints the ACL file of a Redis server for this cluster, with hashes of the passwords.",
    ),
    "repair": LazyCommand(
        "catenaryd.commands.repair:repair",
        "Looks for records, keys and epochs in Redis that no scheduler can use.",
    ),
    "replay": LazyCommand(
        "catenaryd.replay.command:replay_group",
        "Replays recorded cases of scheduling decisions, without a running cluster.",
    ),
    "revoke-key": LazyCommand(
        "catenaryd.commands.keys:revoke_key",
        "Removes the key called NAME, or all of that name; gateways refuse it within two seconds.",
    ),
    "scheduler": LazyCommand(
        "catenaryd.processes:scheduler",
        "Runs a scheduler: plans, reserves, dispatches; leader or standby by a lease in Redis.",
    ),
    "simulate": LazyCommand(
        "catenaryd.simulation.simulating:simulate_group",
        "Simulates a cluster around the scheduler's own planning and dispatch code.",
    ),
    "token": LazyCommand(
        "catenaryd.commands.tokens:token_group",
        "Makes, lists and revokes tokens, by which machines join a cluster.",
    ),
    "up": LazyCommand(
        "catenaryd.commands.up:up",
        "Runs a whole cluster on this machine until Ctrl-C, restarting whatever dies.",
    ),
    "verify-model": LazyCommand(
        "catenaryd.commands.verifying:verify_model",
        "Compares every file of MODEL with its content record; exits with 1 if one differs.",
    ),
}


@click.group(cls=LazyGroup, lazy=LAZY_COMMANDS, context_settings=CONTEXT)
@click.version_option(software_version(), message="%(version)s", help="Print the version.")
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
        from catenaryd.local.supervisor import end_with_parent

        end_with_parent()
    context.obj = config


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def health(arguments: tuple[str, ...]) -> None:
    """Asks a process of this machine whether it is live, ready or leader; for probes.

    Example: catenaryd health ready --address 127.0.0.1:8005
    """
    from catenaryd.health import main as ask

    sys.exit(ask(arguments))


@cli.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Prints what completes commands and options with the tab key, for SHELL to read.

    Example: catenaryd completion bash >> ~/.bashrc
    """
    shell_complete(cli, {}, NAME, _COMPLETION, f"{shell}_source")


def main() -> None:
    """Runs the command line; the entry point of `catenaryd`."""
    if instruction := os.environ.get(_COMPLETION):
        sys.exit(shell_complete(cli, {}, NAME, _COMPLETION, instruction))
    try:
        with cli.make_context(NAME, sys.argv[1:]) as context:  # help and version end here
            from catenary_services.log import configure_logging

            configure_logging("command", "local", "warning", False)  # processes do it again
            cli.invoke(context)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except CatenaryError as error:
        click.echo(error.message, err=True)
        sys.exit(1)
