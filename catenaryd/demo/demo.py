"""The demo: a cluster on this machine, and what it is for, one screen at a time.

Everything it prints is measured in this very run. It succeeds only if all that it shows is as it
should be: equal answers, equal tokens, a refusal in time. How much more one plan serves than
another is shown and not judged, since that is at the mercy of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click

import catenary
from catenary_services.errors import CatenaryError
from catenary_services.log import configure_logging
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo import chats, deadlines, photographs, plans, preparing, screens, unlike_devices
from catenaryd.demo.demo_models import preprocess, sample_photographs
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

MODELS = (plans.VISION_MODEL, plans.CHAT_MODEL)
INTERRUPTED = 130
"""Exit code of a demo that was ended by a signal before it had shown everything."""
_TIMEOUTS = {"heartbeat_s": 1.0, "silence_s": 15.0}
"""Nine processes on two cores must not take each other for dead."""


async def run_demo(data_dir: Path, *, keep: bool) -> int:
    """Runs the demo; returns 0 if everything that it shows is as it should be."""
    running = asyncio.current_task()
    assert running is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    started = time.monotonic()
    try:
        async with _started(data_dir) as cluster:
            facts = cluster.facts()
            admin = str(facts["admin"])
            async with catenary.AsyncClient(str(facts["grpc"]), admin_target=admin) as client:
                good = await _show(client, cluster, ModelRepository(cluster.model_repository))
                _say_where(facts, keep=keep)
            click.echo(_ending(good, time.monotonic() - started))
            if keep:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            click.echo("Stopping the cluster.")
    except (CatenaryError, catenary.CatenaryError) as error:
        click.echo(error.message, err=True)
        return 1
    except asyncio.CancelledError:
        return INTERRUPTED
    return 0 if good else 1


def _ending(good: bool, seconds: float) -> str:
    if good:
        return f"\nAll of it was as it should be, in {seconds:.0f} s."
    return "\nSomething above was NOT as it should be."


@asynccontextmanager
async def _started(data_dir: Path) -> AsyncIterator[LocalCluster]:
    """Prepares the models, and starts a cluster as soon as one of them is there."""
    root = data_dir / "models"
    began = time.monotonic()

    def tell(text: str) -> None:
        click.echo(f"  {time.monotonic() - began:5.1f} s  {text}")

    async def prepare(model: str) -> None:
        log_file = data_dir / "logs" / f"prepare-{model}.log"
        await preparing.prepare(root, model, log_file, lambda text: tell(f"{model}: {text}"))

    preparations = {
        model: asyncio.create_task(prepare(model)) for model in preparing.announce(root, MODELS)
    }
    cluster: LocalCluster | None = None
    try:
        if plans.VISION_MODEL in preparations:
            await preparations[plans.VISION_MODEL]
        cluster = _cluster(data_dir)
        tell(f"starting redis, a scheduler, a gateway and {len(cluster.agent_ids())} agents")
        facts = await cluster.start()
        tell(f"the cluster is up; its dashboard: {facts['http']}/")
        if plans.CHAT_MODEL in preparations:
            await preparations[plans.CHAT_MODEL]
        yield cluster
    finally:
        for task in preparations.values():
            task.cancel()
        await asyncio.gather(*preparations.values(), return_exceptions=True)
        if cluster is not None:
            await cluster.stop()


def _cluster(data_dir: Path) -> LocalCluster:
    """Returns a cluster of three processors and three emulated devices, with the even split."""
    plan_file = data_dir / "plan.json"
    repository = ModelRepository(data_dir / "models")
    plan_file.write_text(json.dumps(plans.even_placement(repository), indent=2))
    agents = unlike_devices.agent_settings()
    return LocalCluster(
        ClusterOptions(
            agents=len(agents),
            models=(plans.VISION_MODEL,),
            plan_file=plan_file,
            grpc_port=0,
            http_port=0,
            data_dir=data_dir,
            extra={"scheduler": _TIMEOUTS, "agent": _TIMEOUTS},
            each_agent=agents,
        )
    )


async def _show(
    client: catenary.AsyncClient, cluster: LocalCluster, repository: ModelRepository
) -> bool:
    """Shows one screen after the other; returns whether all is as it should be."""
    vision, chat = (repository.resolve(model) for model in MODELS)
    blocks, chat_blocks = (repository.block_table(key).blocks for key in (vision, chat))
    images = {name: preprocess(file) for name, file in sample_photographs().items()}
    unsplit = asyncio.create_task(
        asyncio.to_thread(photographs.unsplit_logits, repository, vision, list(images.values()))
    )
    even = plans.with_chats(plans.even_placement(repository), chat_blocks)
    await client.apply_plan(even)
    reference = await unsplit
    ours = await unlike_devices.compare(client, even, chat_blocks)
    over_agents = plans.with_chats(plans.demo_placement(blocks), chat_blocks)
    good = await photographs.classify(client, images, reference, over_agents)
    answer = await chats.undisturbed(client)
    good &= await chats.survive_a_kill(client, cluster, answer)
    await client.apply_plan(ours)
    good &= await deadlines.refuse(client, await unlike_devices.request_of(client))
    good &= await chats.move(client, answer)
    return good


def _say_where(facts: dict[str, object], *, keep: bool) -> None:
    screens.begin(
        6,
        "look around",
        "The dashboard shows what runs where, the book, every request's waterfall, the sessions.",
    )
    if keep:
        screens.show(
            f"dashboard   {facts['http']}/\n"
            f"commands    export CATENARY_TARGET={facts['grpc']}"
            f" CATENARY_ADMIN_TARGET={facts['admin']}\n"
            "            catenary status\n"
            f"            catenary chat {plans.CHAT_MODEL} {chats.QUESTION!r}\n"
            "            catenary plan explain\n"
            "Ctrl-C stops it."
        )
    else:
        screens.show(
            f"dashboard   {facts['http']}/ while this runs\n"
            "to keep it  make demo KEEP=1, or catenaryd demo --keep"
        )


@click.command()
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
    configure_logging("demo", "local", "error", False)
    sys.exit(asyncio.run(run_demo(data_dir, keep=keep)))
