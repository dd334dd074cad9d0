"""The command `catenaryd enrol`: a certificate for one process of a cluster in containers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import click

from catenary_services.addresses import split_host_port
from catenary_services.errors import InvalidInput
from catenary_services.log import configure_logging
from catenary_services.security.identity import Role
from catenaryd.enrolment.role_tokens import ROLES, read_secret
from catenaryd.machines.process_certificates import ProcessCertificate

TIMEOUT_S = 300.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("role", type=click.Choice([str(each) for each in ROLES]))
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--authority",
    "address",
    required=True,
    metavar="HOST:PORT",
    help="Where `catenaryd authority` listens.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The secret of the role's token.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for tls.crt, tls.key and ca.crt.",
)
@click.option("--stay", is_flag=True, help="Stay, and renew them, instead of running COMMAND.")
@click.option("--timeout-s", default=TIMEOUT_S, show_default=True, help="Seconds to keep trying.")
@click.option("--log-json", is_flag=True, envvar="CATENARY_LOG_JSON", help="Log as JSON.")
def enrol(  # noqa: PLR0913, PLR0917
    role: str,
    name: str,
    command: tuple[str, ...],
    address: str,
    token_file: Path,
    folder: Path,
    stay: bool,
    timeout_s: float,
    log_json: bool,
) -> None:
    """Gets a certificate for the process NAME of a ROLE, then runs COMMAND and renews it meanwhile.

    The key is made here and stays here. Without COMMAND it ends, or renews with --stay.

    Example: catenaryd enrol agent agent-0 --authority authority:8006 --token-file agent-token
    --out certs -- catenaryd agent
    """
    configure_logging("enrol", name, "info", log_json)
    if stay and command:
        raise InvalidInput("stay", "contradicts a command")
    host, port = split_host_port(address)
    process = ProcessCertificate(Role(role), name, host, port, read_secret(token_file), folder)
    sys.exit(asyncio.run(_run(process, list(command), stay, timeout_s)))


async def _run(
    process: ProcessCertificate, command: list[str], stay: bool, timeout_s: float
) -> int:
    """Returns the exit code of the command; 0 without one."""
    await process.enrol(timeout_s)
    if not command and not stay:
        return 0
    keeping = asyncio.create_task(process.keep())
    try:
        return await (_until_stopped() if stay else _supervised(command))
    finally:
        keeping.cancel()


async def _until_stopped() -> int:
    stop = asyncio.Event()
    for each in _FORWARDED:
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    await stop.wait()
    return 0


async def _supervised(command: list[str]) -> int:
    """Runs a command, passes signals on to it, and returns its exit code as a shell does."""
    loop = asyncio.get_running_loop()
    child = await asyncio.create_subprocess_exec(*command)
    for each in _FORWARDED:
        loop.add_signal_handler(each, os.kill, child.pid, each)
    code = await child.wait()
    return code if code >= 0 else 128 - code
