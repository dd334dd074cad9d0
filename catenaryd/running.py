"""The command `catenaryd up`: a local cluster until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from catenary.command_line.import_view import ImportView
from catenary.rpc.importing import is_source
from catenary_agent.device_check import check_device
from catenary_agent.executors.device import Device
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import CatenaryError, InvalidInput, RequestCancelled
from catenaryd.demo.models import ensure_model
from catenaryd.enrolment.join_line import JOIN_PORT
from catenaryd.enrolment.join_service import JoinService
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, device_of
from catenaryd.local.public_address import check_free, control_ports
from catenaryd.machines.preflight import machine_name
from catenaryd.sources.child_importer import ChildImporter
from catenaryd.sources.source_names import SourceKind

ADMIN_PORT = 8003
"""Port at which the `catenary` command expects the Admin service by default."""
METRICS_PORT = 8002


def options_of(config_file: Path | None, **flags: Any) -> ClusterOptions:
    """Returns the options of a cluster in the flags of the command line.

    Raises:
        InvalidInput: The devices do not match the number of agents.
    """
    devices: tuple[str, ...] = flags.pop("devices")
    agents: int | None = flags.pop("agents")
    usual = {"admin_port": ADMIN_PORT, "metrics_port": METRICS_PORT}
    for name, port in usual.items():
        if flags[name] is None:
            flags[name] = port if flags["grpc_port"] else 0
    each: tuple[dict[str, Any], ...] = ()
    if len(devices) > 1:
        if agents not in (None, len(devices)) or flags["virtual_gpus"] > 1 or flags["max_agents"]:
            raise InvalidInput(
                "device", "given several times means one agent for each, and no more"
            )
        agents = len(devices)
        each = tuple({"device": device_of(device, i)} for i, device in enumerate(devices))
    return ClusterOptions(
        config_file=config_file,
        device=devices[0],
        agents=3 if agents is None else agents,
        each_agent=each,
        **flags,
    )


def public_options(
    host: str | None,
    advertise: str | None,
    name: str | None,
    scheduler_port: int,
    authority: Path | None,
    tls: bool,
) -> dict[str, Any]:
    """Returns the options of a cluster that are about other machines.

    Raises:
        InvalidInput: A flag needs another one.
    """
    if host is None and (advertise or name):
        raise InvalidInput("host", "is needed with --advertise and --name: machines join there")
    if host is None and authority is not None and not tls:
        raise InvalidInput("authority", "is for --host or --tls")
    return {
        "host": host,
        "advertise": advertise,
        "machine": machine_name(name) if host is not None else "",
        "scheduler_port": scheduler_port,
        "authority": authority,
        "tls": tls,
    }


async def run_up(options: ClusterOptions, *, as_json: bool, join_port: int = JOIN_PORT) -> int:
    """Prepares the models, runs the cluster and drains it on a signal; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def progress(line: str) -> None:
        click.echo(line, err=True)

    cluster = LocalCluster(options)
    joins: JoinService | None = None
    line = ""
    try:
        for device in cluster.devices():  # before the minutes that models may take
            await asyncio.to_thread(check_device, Device.parse(device), 0)
        cluster.check_ports()
        if cluster.public is not None:
            ports = [*cluster.scheduler_ports, *control_ports(cluster.scheduler_ports)]
            check_free(cluster.public.bind, ports, "--scheduler-port")
            joins = JoinService(cluster)
            line = str(await joins.start(join_port))
            progress(f"machines join with\n  catenaryd join '{line}'")
        models = [await prepared(cluster, model, stop, progress) for model in options.models]
        cluster.options = replace(options, models=tuple(models))
        starting = asyncio.create_task(cluster.start(progress))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            facts = starting.result()
            if line:
                facts["join"] = line
            click.echo(json.dumps(facts) if as_json else _sentence(facts))
            await stopping
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        stopping.cancel()
    except CatenaryError as error:
        click.echo(error.message, err=True)
        return 1
    finally:
        progress("draining")
        if joins is not None:
            await joins.close()
        await cluster.stop()
    return 0


async def prepared(
    cluster: LocalCluster, model: str, stop: asyncio.Event, progress: Callable[[str], None]
) -> str:
    """Returns the name of a model that the repository has now; a source is imported into it.

    Raises:
        CatenaryError: It cannot be prepared, or a signal came meanwhile.
    """
    if not is_source(model):
        progress(f"preparing {model}")
        await asyncio.to_thread(ensure_model, cluster.model_repository, model)
        return model
    on_gpus = all(device.startswith("cuda") for device in cluster.devices())
    request = admin_pb2.ImportModelRequest(source=model, target="gpu" if on_gpus else "both")
    importing = asyncio.create_task(_imported(cluster, request))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({importing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not importing.done():
        importing.cancel()
        await asyncio.gather(importing, return_exceptions=True)
        raise RequestCancelled(f"{model}: stopped while it was imported; what was fetched is kept")
    return importing.result()


async def _imported(cluster: LocalCluster, request: admin_pb2.ImportModelRequest) -> str:
    importer = ChildImporter(cluster.model_repository, [kind.value for kind in SourceKind])
    name = ""
    with ImportView() as view:
        async with contextlib.aclosing(importer.bring(request)) as steps:
            async for step in steps:
                view.show(step)
                name = f"{step.model}:{step.version}"
    return name


def _sentence(facts: dict[str, object]) -> str:
    line = facts.get("join")
    join = f"\nother machines join within an hour by: catenaryd join '{line}'" if line else ""
    return (
        f"serving {facts['models']} on grpc {facts['grpc']} and {facts['http']}"
        f" (metrics {facts['metrics']}, admin {facts['admin']}); Ctrl-C drains{join}"
    )
