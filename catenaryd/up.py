"""`catenaryd up`: a local cluster until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import click

from catenaryd.local_cluster import ClusterOptions, LocalCluster
from catenaryd.models import ensure_model
from services.errors import CatenaryError


async def run_up(options: ClusterOptions, *, as_json: bool) -> int:
    """Prepares the models, runs the cluster, drains it on a signal; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def progress(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(line, err=True)

    cluster = LocalCluster(options)
    try:
        for model in options.models:
            progress(f"preparing {model}")
            await asyncio.to_thread(ensure_model, cluster.model_repository, model)
        starting = asyncio.create_task(cluster.start(progress))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            facts = starting.result()
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
        await cluster.stop()
    return 0


def _sentence(facts: dict[str, object]) -> str:
    return (
        f"serving {facts['models']} on grpc {facts['grpc']} and {facts['http']}"
        f" (metrics {facts['metrics']}, admin {facts['admin']}); Ctrl-C drains"
    )
