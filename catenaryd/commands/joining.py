"""The commands `catenaryd join` and `catenaryd leave`: this machine in another one's cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from catenary_services.log import configure_logging
from catenaryd.commands.installing import InstallChoice, install_command, install_options
from catenaryd.shared_options import AS_JSON

UNIT = "catenary-join"
ARRIVAL_S = 180.0
"""Seconds that agents of a machine may take to be heard of."""
LEAVE_S = 80.0
_POLL_S = 0.2
_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".catenary"),
    show_default=True,
    help="Certificates, logs and models of this machine.",
)


@click.command()
@click.argument("line", required=False, metavar="[JOIN_LINE]")
@_DATA_DIR
@click.option("--name", help="This machine's name in the cluster.  [default: its host name]")
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="cpu, cuda:N, cuda (all GPUs) or emulated:CLASS; may be repeated: one agent each."
    "  [default: cpu]",
)
@click.option("--host", "bind", help="Address to listen on.  [default: the one on the way there]")
@click.option(
    "--advertise", help="Address that other machines reach this one at.  [default: --host]"
)
@click.option(
    "--transport-port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="Port for tensors of the first agent, and the following for more; 0: any free ones.",
)
@click.option(
    "--model-repository",
    type=click.Path(path_type=Path),
    help="Folder of models, where agents put what they fetch.  [default: models in --data-dir]",
)
@click.option("--max-memory-bytes", default=0, help="Memory for models on each device; 0: usual.")
@click.option("--max-threads", default=0, help="Compute threads of each agent; 0: its share.")
@click.option(
    "--link-bytes-per-second", default=0, help="Speed of this machine's network; 0: measured."
)
@click.option("--foreground", is_flag=True, help="Stay, and drain on Ctrl-C or SIGTERM.")
@install_options
@AS_JSON
@click.pass_obj
def join(
    config: Path | None,
    /,
    line: str | None,
    data_dir: Path,
    foreground: bool,
    as_json: bool,
    install: InstallChoice,
    **flags: Any,
) -> None:
    """Joins the cluster of JOIN_LINE, as `catenaryd up --host` printed it; "-" reads it.

    Checks device, clock, release, ports and the way to the host, gets certificates for a key that
    never leaves this machine, and starts one agent for each device. Afterwards it needs no join
    line any more: `catenaryd join` starts the agents again.

    Example: catenaryd join 'catenary://10.0.0.5:8006?token=...&ca=sha256:...' --device cuda
    """
    configure_logging("join", "local", "warning", False)
    arguments = ["join", "--foreground", "--data-dir", str(data_dir.absolute())]
    if config is not None:
        arguments = ["--config", str(config.absolute()), *arguments]
    if install.wanted and install.dry_run:
        install_command(UNIT, "Catenary: this machine's agents", install, arguments)
        return
    from catenaryd.machines.joined_machine import MachineStore

    folder = MachineStore(data_dir)
    machine = asyncio.run(_joined(folder, sys.stdin.read() if line == "-" else line, flags))
    if install.wanted:
        install_command(UNIT, "Catenary: this machine's agents", install, arguments)
        return
    facts = {
        "machine": machine.name,
        "cluster": machine.cluster,
        "agents": list(machine.agents),
        "address": machine.advertise,
        "link_bytes_per_second": machine.link_bytes_per_second or None,
    }
    if foreground:
        from catenaryd.machines.joined_agents import run_agents

        if as_json:
            click.echo(json.dumps(facts))
        asyncio.run(run_agents(folder, machine, arguments[: arguments.index("join")]))
        return
    states = _start(folder, arguments)
    if as_json:
        click.echo(json.dumps({**facts, "states": states}))
    else:
        shown = ", ".join(f"{agent} is {state}" for agent, state in states.items())
        click.echo(
            f"{machine.name} is in cluster {machine.cluster}: {shown}; `catenaryd leave` drains it"
        )


@click.command()
@_DATA_DIR
@AS_JSON
def leave(data_dir: Path, as_json: bool) -> None:
    """Drains this machine's agents, ends them, and forgets its certificates.

    What they work on is finished or moved first; its name is free afterwards.

    Example: catenaryd leave
    """
    from catenaryd.machines.joined_machine import MachineStore
    from catenaryd.machines.joining import leave as tell_host

    folder = MachineStore(data_dir)
    machine = folder.read()
    if machine is None:
        raise InvalidInput("data_dir", f"{data_dir} is not of a machine that joined a cluster")
    if (holder := folder.holder()) is not None:
        os.kill(holder, signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_S
        while folder.holder() == holder:
            if time.monotonic() > deadline:
                raise Unavailable(f"process {holder} does not end; see {data_dir / 'logs'}")
            time.sleep(_POLL_S)
    why = asyncio.run(tell_host(folder, machine))
    facts = {"machine": machine.name, "cluster": machine.cluster, "host_told": not why}
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{machine.name} has left cluster {machine.cluster}")
    if why:
        click.echo(
            f"the host could not be told ({why}): the name stays its until the certificates end",
            err=True,
        )


async def _joined(folder: Any, text: str | None, flags: dict[str, Any]) -> Any:
    """Returns the machine that a folder holds; it joins first unless it has."""
    from catenaryd.enrolment.join_line import parse_join_line
    from catenaryd.machines import preflight
    from catenaryd.machines.joining import JoinOptions, check_same, enrol

    line = parse_join_line(text) if text else None
    devices = preflight.devices_of(flags["devices"]) if flags["devices"] else None
    machine = folder.read()
    if machine is not None and _is_usable(folder, machine):
        changes = {"name": flags["name"], "devices": devices, "advertise": flags["advertise"]}
        check_same(machine, line, changes)
        await preflight.check_devices(machine.devices, machine.memory_bytes)
        return machine
    if line is None:
        raise InvalidInput(
            "join line",
            "is missing: this machine has not joined, or its certificates have ended; `catenaryd"
            " token create` on the host prints one",
        )
    options = JoinOptions(
        name=preflight.machine_name(flags["name"]),
        devices=devices or ("cpu",),
        bind=flags["bind"],
        advertise=flags["advertise"],
        transport_port=flags["transport_port"],
        model_repository=flags["model_repository"],
        memory_bytes=flags["max_memory_bytes"],
        threads=flags["max_threads"],
        link_bytes_per_second=flags["link_bytes_per_second"],
    )
    return await enrol(folder, line, options, lambda told: click.echo(told, err=True))


def _is_usable(folder: Any, machine: Any) -> bool:
    try:
        for agent in machine.agents:
            folder.certificate_of(machine, agent)
    except InvalidInput:
        return False
    return True


def _start(folder: Any, arguments: list[str]) -> dict[str, str]:
    """Starts the agents in the background; returns their states once the cluster has all of them.

    Raises:
        Unavailable: They run already, ended, or were not heard of in time.
    """
    from catenaryd.machines.joining import agent_states

    if (holder := folder.holder()) is not None:
        raise Unavailable(f"this machine's agents run already, as process {holder}")
    log = folder.data_dir / "logs" / "join.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "catenaryd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    machine = folder.read()
    deadline, why = time.monotonic() + ARRIVAL_S, "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").splitlines()
            raise Unavailable(f"the agents ended: {lines[-1] if lines else 'without a word'}")
        try:
            states = asyncio.run(agent_states(folder, machine))
        except CatenaryError as error:
            why = error.message
        else:
            missing = [each for each in machine.agents if states.get(each, "lost") == "lost"]
            if not missing:
                return states
            why = f"the cluster has not heard of {', '.join(missing)}"
        time.sleep(_POLL_S)
    raise Unavailable(f"{why} after {ARRIVAL_S:.0f} s; the agents go on trying, see {log.parent}")
