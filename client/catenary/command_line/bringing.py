"""The commands that bring models in and take them out: `deploy`, `pull` and `undeploy`."""

from __future__ import annotations

from typing import Annotated

import typer

from catenary.client import Client
from catenary.command_line.import_view import ImportView
from catenary.command_line.kit import CommandOptions, command, fail, print_json
from catenary.rpc.importing import ImportOrder, ImportProgress, is_source

_SOURCE_HELP = (
    "hf:ORGANISATION/NAME (with /FILE and @REVISION), an s3://, gs://, http(s):// or file:// URL, "
    "or a file or folder"
)
_NAME = Annotated[
    str, typer.Option("--name", help="Name it gets; the last part of the source if left out.")
]
_FILE = Annotated[str, typer.Option(help="The file of the source, if it has several models.")]
_PRECISION = Annotated[str, typer.Option(help="Of the weights: fp32, int8 or int4.")]
_RUN_ON = Annotated[
    str,
    typer.Option(help="Agents that are to run it: cpu, gpu or both; those connected if left out."),
]
_ENGINE = Annotated[
    str,
    typer.Option(
        help="Import it for this engine alone, vllm or llama_server: agents that have it serve the "
        "model whole, of any family."
    ),
]
_KEEP_GGUF = Annotated[
    bool,
    typer.Option(
        "--keep-gguf",
        help="Keep a GGUF file beside the blocks made of it, for agents with llama-server.",
    ),
]
_SESSION_TOKENS = Annotated[int, typer.Option(min=0, help="Most tokens of one session; 0: 2048.")]
_ENDPOINT = Annotated[
    str, typer.Option(help="A mirror of the hub; HF_ENDPOINT of the cluster if left out.")
]
_TOKEN = Annotated[
    str,
    typer.Option(
        envvar="CATENARY_HUB_TOKEN",
        show_envvar=True,
        help="Sent to the cluster, to ask the hub with; HF_TOKEN of the cluster if left out.",
    ),
]
_DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary deploy efficientnet-lite0 --slo-ms 200 --partitions 3")(
        deploy
    )
    app.command(epilog="Example: catenary pull hf:organisation/name@main --run-on gpu")(pull)
    app.command(epilog="Example: catenary undeploy efficientnet-lite0")(undeploy)


@command
def deploy(  # noqa: PLR0913, PLR0917 - one parameter an option
    options: CommandOptions,
    model: Annotated[
        str,
        typer.Argument(help=f"A model of the server's repository, or its source: {_SOURCE_HELP}."),
    ],
    version: Annotated[str, typer.Option(help="The latest if left out.")] = "",
    slo_ms: Annotated[float | None, typer.Option(help="Default SLO of its requests.")] = None,
    partitions: Annotated[int, typer.Option(min=0, help="Parts to cut it into; 0: any.")] = 0,
    max_batch: Annotated[int, typer.Option(min=0, help="Largest batch; 0: any.")] = 0,
    packing: Annotated[
        str,
        typer.Option(help="What sessions are moved for: pack, balance or off; empty: as usual."),
    ] = "",
    name: _NAME = "",
    file: _FILE = "",
    precision: _PRECISION = "",
    run_on: _RUN_ON = "",
    engine: _ENGINE = "",
    session_tokens: _SESSION_TOKENS = 0,
    hub_endpoint: _ENDPOINT = "",
    hub_token: _TOKEN = "",
    *,
    keep_gguf: _KEEP_GGUF = False,
) -> None:
    """Deploy a model and print the id of the plan that serves it.

    Where the repository does not have it yet, it is fetched and imported first.
    """
    order = ImportOrder(
        model,
        file=file,
        name=name,
        version=version,
        precision=precision,
        target=run_on,
        engine=engine,
        keep_gguf=keep_gguf,
        session_tokens=session_tokens,
        hub_endpoint=hub_endpoint,
        hub_token=hub_token,
    )
    with options.operator() as client:
        if is_source(model):
            brought = _brought(client, order)
            model, version = brought.model, brought.version
        else:
            _refuse_import_options(order)
            model, _, named = model.partition(":")
            version = version or named
        plan_id = client.deploy(
            model,
            version=version,
            slo_ms=slo_ms,
            partitions=partitions,
            max_batch=max_batch,
            packing=packing,
        )
    print_plan_id(options, plan_id)


@command
def pull(  # noqa: PLR0913, PLR0917 - one parameter an option
    options: CommandOptions,
    source: Annotated[str, typer.Argument(help=f"{_SOURCE_HELP}.")],
    name: _NAME = "",
    version: Annotated[str, typer.Option(help="The next free number if left out.")] = "",
    file: _FILE = "",
    precision: _PRECISION = "",
    run_on: _RUN_ON = "",
    engine: _ENGINE = "",
    session_tokens: _SESSION_TOKENS = 0,
    hub_endpoint: _ENDPOINT = "",
    hub_token: _TOKEN = "",
    *,
    keep_gguf: _KEEP_GGUF = False,
    dry_run: _DRY_RUN = False,
) -> None:
    """Fetch a model and import it into the cluster's repository, without serving it.

    The machine of the repository does the work. Ctrl-C cancels it; what was fetched is kept, and
    the same command goes on from there.
    """
    if not is_source(source):
        fail(f"{source!r} is a name of the repository; a source is {_SOURCE_HELP}", 2)
    order = ImportOrder(
        source,
        file=file,
        name=name,
        version=version,
        precision=precision,
        target=run_on,
        engine=engine,
        keep_gguf=keep_gguf,
        session_tokens=session_tokens,
        hub_endpoint=hub_endpoint,
        hub_token=hub_token,
        dry_run=dry_run,
    )
    with options.operator() as client:
        brought = _brought(client, order)
    if options.as_json:
        facts = {"model": brought.model, "version": brought.version, "known": brought.known}
        print_json({**facts, "total_bytes": brought.total_bytes})
    else:
        typer.echo(f"{brought.model}:{brought.version}")


@command
def undeploy(
    options: CommandOptions,
    model: Annotated[str, typer.Argument(help="A model that is deployed: NAME or NAME:VERSION.")],
) -> None:
    """Serve a model no longer; its files stay in the repository."""
    name, _, version = model.partition(":")
    with options.operator() as client:
        gone = client.undeploy(name, version=version)
    if options.as_json:
        print_json({"model": name, "version": gone, "undeployed": True})
    else:
        typer.echo(f"{name}:{gone} is served no longer")


def print_plan_id(options: CommandOptions, plan_id: str) -> None:
    if options.as_json:
        print_json({"plan_id": plan_id})
    else:
        typer.echo(plan_id)


def _brought(client: Client, order: ImportOrder) -> ImportProgress:
    with ImportView() as display:
        return client.pull(order, watch=display.show)


def _refuse_import_options(order: ImportOrder) -> None:
    """Refuses options that say how to import where nothing is imported."""
    given = {
        "--name": order.name,
        "--file": order.file,
        "--precision": order.precision,
        "--run-on": order.target,
        "--engine": order.engine,
        "--keep-gguf": order.keep_gguf,
        "--session-tokens": order.session_tokens,
        "--hub-endpoint": order.hub_endpoint,
    }
    for option, value in given.items():
        if value:
            fail(f"{option} is for a source, and this is a name of the repository", 2)
