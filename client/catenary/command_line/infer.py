"""The command `infer`, which sends one request to a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from catenary.client import Client
from catenary.command_line.images import Normalisation, image_input, top_classes
from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.errors import InvalidInputError
from catenary.tensors import Array, datatype_of
from catenary.types import InferRequest, InferResult

InputFiles = Annotated[
    list[str] | None,
    typer.Option("--input", help="An input tensor: name=FILE.npy. May be repeated."),
]
ImageFile = Annotated[
    Path | None, typer.Option("--image", help="An image, for models that take 1x3xHxW FP32.")
]
Mean = Annotated[float, typer.Option(help="With --image: subtracted from each pixel value.")]
Scale = Annotated[float, typer.Option(help="With --image: what the difference is divided by.")]


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command(
        epilog="Example: catenary infer efficientnet-lite0 --image cat.jpg --labels labels.txt"
    )(infer)


@command
def infer(  # noqa: PLR0913 - one parameter an option
    options: CommandOptions,
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    *,
    image: ImageFile = None,
    inputs: InputFiles = None,
    version: Annotated[str, typer.Option(help="The server's choice if left out.")] = "",
    slo_ms: Annotated[float | None, typer.Option(help="When the answer must be there.")] = None,
    timeout: Annotated[float | None, typer.Option(help="gRPC deadline in seconds.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Echoed; drawn if left out.")] = None,
    top: Annotated[int, typer.Option(min=1, help="With --image: classes to print.")] = 5,
    labels: Annotated[
        Path | None, typer.Option(help="With --image: class names, one a line.")
    ] = None,
    mean: Mean = 127.0,
    scale: Scale = 128.0,
    output_dir: Annotated[
        Path | None, typer.Option(help="Writes each output there as NAME.npy.")
    ] = None,
) -> None:
    """Send one request to a model: an image to classify, or tensors."""
    names = _read_labels(labels)
    with options.client() as client:
        tensors = gather_inputs(client, model, image, inputs, Normalisation(mean, scale))
        request = InferRequest(
            model, tensors, version=version, slo_ms=slo_ms, request_id=request_id
        )
        started = time.monotonic()
        result = client.send(request, timeout_s=timeout)
        elapsed_ms = (time.monotonic() - started) * 1e3
    if output_dir is not None:
        _save(result, output_dir)
    classes = _classes(result, top, names) if image is not None else []
    if options.as_json:
        print_json(_facts(result, classes, elapsed_ms))
        return
    if classes:
        console().print(table(("CLASS", "PROBABILITY", "LABEL"), classes))
    else:
        rows = (
            (name, datatype_of(array), str(list(array.shape)), _preview(array))
            for name, array in result.outputs.items()
        )
        console().print(table(("OUTPUT", "DATATYPE", "SHAPE", "VALUES"), rows))
    typer.echo(f"request {result.id}  {elapsed_ms:.1f} ms")


def gather_inputs(
    client: Client,
    model: str,
    image: Path | None,
    files: Sequence[str] | None,
    normalisation: Normalisation,
) -> dict[str, Array]:
    """Returns the tensors that --image or --input name."""
    if (image is None) == (not files):
        raise InvalidInputError.at("--image", "give either an image or --input, one of the two")
    if image is not None:
        name, array = image_input(image, client.model_metadata(model), normalisation)
        return {name: array}
    return dict(_load_tensor(item) for item in files or ())


def _load_tensor(item: str) -> tuple[str, Array]:
    name, separator, path = item.partition("=")
    if not separator or not name or not path:
        raise InvalidInputError.at("--input", f"{item!r} is not of the form name=FILE.npy")
    try:
        # Object arrays would need pickle, which can run code.
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InvalidInputError.at("--input", f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise InvalidInputError.at("--input", f"{path} is no .npy file of plain values") from error
    if not isinstance(loaded, np.ndarray):
        raise InvalidInputError.at("--input", f"{path} holds several arrays; save one with np.save")
    return name, loaded


def _read_labels(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.at("--labels", f"{path} cannot be read: {error}") from error


def _classes(result: InferResult, top: int, names: list[str]) -> list[tuple[int, float, str]]:
    for array in result.outputs.values():
        if array.dtype.kind == "f" and array.size > 1:
            return [
                (index, probability, names[index] if index < len(names) else "")
                for index, probability in top_classes(array[0], top)
            ]
    return []


def _save(result: InferResult, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in result.outputs.items():
            # Names come from the server, and none may lead out of the folder.
            path = folder / f"{name.replace('/', '_').replace(chr(92), '_')}.npy"
            np.save(path, array.astype("S") if array.dtype == object else array)
    except OSError as error:
        fail(f"{folder} cannot be written: {error.strerror}")


def _facts(
    result: InferResult, classes: list[tuple[int, float, str]], elapsed_ms: float
) -> dict[str, Any]:
    return {
        "id": result.id,
        "model": result.model,
        "version": result.version,
        "elapsed_ms": elapsed_ms,
        "outputs": [
            {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
            for name, array in result.outputs.items()
        ],
        "classes": [
            {"index": index, "probability": probability, "label": label}
            for index, probability, label in classes
        ],
    }


def _preview(array: Array) -> str:
    return np.array2string(array.ravel()[:6], precision=4, max_line_width=80)
