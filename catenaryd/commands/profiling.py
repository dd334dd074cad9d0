"""The commands `catenaryd prepare`, which cuts a model, and `profile`, which times its blocks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.domain.profile import DeviceProfile, ModelProfile, profile_document
from catenary_services.errors import InvalidInput
from catenary_services.log import configure_logging
from catenary_services.models.model_repository import PROFILE_FILE, ModelRepository
from catenaryd.shared_options import MODEL_REPOSITORY

_QUIET_LOAD = 0.5
"""Load per core above which measured times are not to be trusted."""


def _numbers(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list like 1,2,4", param=parameter) from None


@click.command()
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
    for tensor in table["inputs"]:
        free = "" if tensor["shape"] == tensor["measured_shape"] else "; -1 is free"
        click.echo(
            f"input {tensor['name']}: {tensor['datatype']} {tensor['shape']}{free},"
            f" measured with {tensor['measured_shape']}"
        )
    if table["unit_tokens"]:
        click.echo(f"batches are counted in units of {table['unit_tokens']} tokens")
    for block in table["blocks"]:
        click.echo(
            f"block {block['index']:>3}  {block['compute_ms']:9.3f} ms"
            f"  {block['output_bytes_per_row']:>12,} bytes out per row"
        )


@click.command()
@click.argument("model")
@MODEL_REPOSITORY
@click.option("--device", default="cpu", show_default=True, help="Device to measure: cpu, cuda:0.")
@click.option("--device-class", default="", help="Its name in the profile; default: its own name.")
@click.option(
    "--levels",
    default="1,2,4",
    show_default=True,
    callback=_numbers,
    help="Into how many virtual GPUs the device is divided.",
)
@click.option(
    "--batches", default="1,2,4,8", show_default=True, callback=_numbers, help="Batch sizes."
)
@click.option(
    "--blocks",
    default=10,
    show_default=True,
    help="How many blocks to aim for if the model has not been cut yet.",
)
@click.option("--runs", default=20, show_default=True, help="Runs per measurement, at least.")
@click.option(
    "--estimate",
    "estimates",
    multiple=True,
    help="Device class to estimate from its data sheet, e.g. T4; may be repeated.",
)
@click.option(
    "--precision", default="tf32", show_default=True, help="Of estimates: fp32, tf32, fp16, int8."
)
@click.option("--again", is_flag=True, help="Measure anew what the file has already.")
@click.option("--no-measure", is_flag=True, help="Estimate only.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; default: profile.json beside the model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def profile(model: str, model_repository: Path, as_json: bool, **options: Any) -> None:
    """Measures every block of MODEL (name or name:version) and writes profile.json beside it.

    Each block runs at every batch size and virtual-GPU level while all virtual GPUs of the device
    are busy with the same. What is in the file already is kept; a run that was interrupted goes on
    where it was.

    Example: catenaryd profile efficientnet-lite0 --levels 1,2 --estimate T4 --estimate L4
    """
    # Imported here, because other commands need no runtime.
    from catenary_agent.profiling.profiler import ProfileOrder, profile_model

    configure_logging("profile", "local", "error", False)
    order = ProfileOrder(
        device=None if options["no_measure"] else options["device"],
        device_class=options["device_class"],
        levels=options["levels"],
        batch_sizes=options["batches"],
        runs=options["runs"],
        estimates=options["estimates"],
        precision=options["precision"],
        again=options["again"],
    ).checked()
    if options["blocks"] < 1:
        raise InvalidInput("blocks", f"is {options['blocks']}, not at least 1")
    if order.device is not None:
        _warn_if_busy()
    from catenaryd.demo.models import ensure_model

    key = ensure_model(model_repository, model, options["blocks"])
    repository = ModelRepository(model_repository)
    target: Path = options["output"] or repository.folder(key) / PROFILE_FILE
    with _progress_bar(f"profiling {key}") as callbacks:
        found = profile_model(repository, key, order, target, callbacks)
    if as_json:
        click.echo(json.dumps(profile_document(found)))
        return
    for line in _lines(found):
        click.echo(line)
    click.echo(f"written to {target}")


def _warn_if_busy() -> None:
    """Warns if the host is busy, which makes times too long without a trace in the profile."""
    if not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores * _QUIET_LOAD:
        click.echo(
            f"warning: this host is busy (load {load:.1f} on {cores} cores);"
            " measured times will be too long",
            err=True,
        )


@contextmanager
def _progress_bar(title: str) -> Iterator[Any]:
    """Yields callbacks that show a progress bar on a terminal, and nothing in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    from catenary_agent.profiling.profiler import ProfileCallbacks

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield ProfileCallbacks(
            begin=lambda steps: bar.update(task, total=steps),
            step=lambda step: bar.update(
                task,
                advance=1,
                description=f"{title}: level {step.level}, block {step.block}, batch {step.rows}",
            ),
        )


def _lines(found: ModelProfile) -> Iterator[str]:
    """Yields a report for people: times of the whole model, then of its blocks."""
    for device in found.devices:
        kind = "ESTIMATED" if device.estimated else "measured"
        level = device.virtual_level
        yield f"{device.device_class} as {level} virtual GPU{'s' if level > 1 else ''}, {kind}:"
        yield f"  {device.source.partition(': ')[2]}"
        for rows in device.batch_sizes:
            yield f"  batch {rows:>3}  {_whole_ms(found, device, rows):10.3f} ms, the sum of blocks"
    for block in range(found.blocks):
        times = "  ".join(
            f"{device.device_class}/{device.virtual_level} "
            f"{device.p50_ns[block][0] / NANOSECONDS_PER_MILLISECOND:.3f} ms"
            for device in found.devices
        )
        yield (
            f"block {block:>3}  {found.block_weight_bytes[block]:>12,} bytes of weights"
            f"  {found.cut_row_bytes[block]:>12,} bytes enter per row  {times}"
        )


def _whole_ms(found: ModelProfile, device: DeviceProfile, rows: int) -> float:
    return device.compute_ns(0, found.blocks)[rows - 1] / NANOSECONDS_PER_MILLISECOND
