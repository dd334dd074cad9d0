"""The process of a machine that joined: one agent for each device, watched and drained."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Any

from catenary_services.errors import CatenaryError, Unavailable
from catenary_services.log import get_logger
from catenaryd.local.supervisor import ChildProcess
from catenaryd.machines.joined_machine import JoinedMachine, MachineStore
from catenaryd.machines.joining import refresh
from catenaryd.process_options import command_line_of

log = get_logger(__name__)

RENEW_EVERY_S = 3_600.0
RETRY_EVERY_S = 60.0
DRAIN_S = 60.0
"""Seconds that agents have to hand their work over before they are ended; `leave` and systemd wait
longer."""


def agent_settings(folder: MachineStore, machine: JoinedMachine, number: int) -> dict[str, Any]:
    """Returns the settings of agent `number` of a machine."""
    agent, device = machine.agents[number], machine.devices[number]
    cert_file, key_file, authorities = folder.files_of(machine, agent)
    settings: dict[str, Any] = {
        "agent_id": agent,
        "device": device,
        "server_id": machine.name,
        "device_id": f"{machine.name}/{number}",
        "cluster": machine.cluster,
        "tls_cert_file": cert_file,
        "tls_key_file": key_file,
        "tls_ca_file": authorities,
        "scheduler_addresses": list(machine.scheduler_addresses),
        "transport_host": machine.bind,
        "advertise_host": machine.advertise,
        "transport_port": machine.transport_port + number if machine.transport_port else None,
        "model_repository": machine.model_repository,
        "runtime_dir": folder.data_dir / "run",
        "host_devices": max(1, sum(each == "cpu" for each in machine.devices)),
        "link_bytes_per_second": machine.link_bytes_per_second or None,
        "memory_bytes": machine.memory_bytes or None,
        "threads": machine.threads or None,
        "drain_timeout_s": DRAIN_S - 10.0,
    }
    if machine.scheduler_groups > 1:
        settings |= {
            "scheduler_groups": machine.scheduler_groups,
            "scheduler_group": str(machine.group),
        }
    return settings


async def run_agents(
    folder: MachineStore, machine: JoinedMachine, config: Sequence[str] = ()
) -> None:
    """Runs a machine's agents until SIGTERM or SIGINT, then drains them.

    `config` are arguments of `catenaryd` that go before the command: its configuration file.

    Raises:
        Unavailable: Another process runs them.
        InvalidInput: A certificate is missing, or has ended.
    """
    lock = folder.lock()
    if lock is None:
        raise Unavailable(
            f"{machine.name} runs already, as process {folder.holder()}; `catenaryd leave` ends it"
        )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    for agent in machine.agents:
        folder.certificate_of(machine, agent)
    with contextlib.suppress(CatenaryError):  # without the host, what it said last is good enough
        machine = await refresh(folder, machine)
    children = [
        ChildProcess(
            agent,
            [*config, "agent", *command_line_of(agent_settings(folder, machine, number))],
            folder.data_dir / "logs" / f"{agent}.log",
        )
        for number, agent in enumerate(machine.agents)
    ]
    renewing = asyncio.create_task(keep_fresh(folder, machine), name="renew")
    try:
        for child in children:
            await child.start()
        await stop.wait()
    finally:
        renewing.cancel()
        await asyncio.gather(*(child.stop(DRAIN_S) for child in children), return_exceptions=True)
        await asyncio.wait({renewing})


async def keep_fresh(folder: MachineStore, machine: JoinedMachine) -> None:
    """Renews certificates that end soon until cancelled; agents read the new ones."""
    while True:
        pause_s = RENEW_EVERY_S
        try:
            fresh = await refresh(folder, machine)
            if fresh != machine:
                log.warning("host_changed", hint="restart this machine's agents to follow it")
                machine = fresh
        except CatenaryError as error:
            log.warning("certificates_not_renewed", why=error.message)
            pause_s = RETRY_EVERY_S
        except OSError as error:
            log.error("certificates_not_renewed", why=str(error))
            pause_s = RETRY_EVERY_S
        await asyncio.sleep(pause_s)
