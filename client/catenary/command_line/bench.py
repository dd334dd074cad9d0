"""The command `bench`, which measures a model under load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from catenary.client import Client
from catenary.command_line.images import Normalisation
from catenary.command_line.infer import ImageFile, InputFiles, gather_inputs
from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.errors import InvalidInputError
from catenary.load import LoadReport, LoadSettings, run_load
from catenary.tensors import DTYPE_OF, Array
from catenary.types import InferRequest


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command(
        epilog="Example: catenary bench efficientnet-lite0 --rate 20 --seconds 10 --slo-ms 300"
    )(bench)


@command
def bench(  # noqa: PLR0913 - one parameter an option
    options: CommandOptions,
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    *,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: callers that wait for each answer.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: Poisson arrivals a second.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to send.")] = 10.0,
    slo_ms: Annotated[
        float | None, typer.Option(help="Sent with each request; attainment counts against it.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="gRPC deadline in seconds.")] = None,
    image: ImageFile = None,
    inputs: InputFiles = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of generated inputs.")] = 1,
    seed: Annotated[int, typer.Option(help="Of arrivals and generated inputs.")] = 0,
) -> None:
    """Load a model and print rate, latency percentiles and errors by reason."""
    if rate is not None and concurrency is not None:
        raise InvalidInputError.at("--rate", "and --concurrency exclude each other")
    settings = LoadSettings(seconds, rate, concurrency or 1, timeout, slo_ms, seed)
    with options.client() as client:
        if image is not None or inputs:
            tensors = gather_inputs(client, model, image, inputs, Normalisation())
        else:
            tensors = _random_inputs(client, model, rows, seed)
    request = InferRequest(model, tensors, slo_ms=slo_ms)
    with _progress(model) as show:
        report = asyncio.run(_measure(options, request, settings, show))
    if options.as_json:
        print_json({"model": model, **report.facts()})
    else:
        console().print(_page(report))
    if not report.latencies_ms:
        fail(f"no request was answered ({', '.join(report.errors) or 'none was sent'})")


async def _measure(
    options: CommandOptions,
    request: InferRequest,
    settings: LoadSettings,
    show: Callable[[LoadReport], None],
) -> LoadReport:
    async with options.async_client() as client:
        return await run_load(client, request, settings, show)


def _random_inputs(client: Client, model: str, rows: int, seed: int) -> dict[str, Array]:
    """Returns inputs that fit the model's metadata, with `rows` rows where dimension 0 is free."""
    draw = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for tensor in client.model_metadata(model).inputs:
        free = (rows if position == 0 else 1 for position in range(len(tensor.shape)))
        shape = tuple(
            size if size >= 0 else chosen for size, chosen in zip(tensor.shape, free, strict=True)
        )
        dtype = DTYPE_OF.get(tensor.datatype)
        if dtype is None:
            raise InvalidInputError.at(
                "--input", f"is needed: values for {tensor.name} ({tensor.datatype}) are not drawn"
            )
        values = draw.random(shape) if dtype.kind == "f" else draw.integers(0, 2, shape)
        made[tensor.name] = np.asarray(values).astype(dtype)
    return made


@contextmanager
def _progress(model: str) -> Iterator[Callable[[LoadReport], None]]:
    """Yields a callback that shows the number of answers, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda report: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(model)

        def show(report: LoadReport) -> None:
            failed = report.errors.total()
            answered = len(report.latencies_ms)
            bar.update(task, description=f"{model}: {answered} answered, {failed} failed")

        yield show


def _page(report: LoadReport) -> Any:
    facts = report.facts()
    rows: list[tuple[str, object]] = [
        ("requests", facts["requests"]),
        ("answered a second", facts["rate_rps"]),
        *(
            (name.replace("_", " "), _milliseconds(facts[name]))
            for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")
        ),
        *((f"error {reason}", count) for reason, count in report.errors.most_common()),
    ]
    rows += [("good", report.good), ("late", report.late), ("refused", report.refused)]
    if report.client:
        rows.append(("client's own mistakes", report.client))
    if report.attainment is not None:
        rows.append((f"within {report.slo_ms:g} ms, of all", f"{report.attainment:.1%}"))
    return table(("FIGURE", "VALUE"), rows)


def _milliseconds(value: object) -> object:
    return "-" if value is None else value
