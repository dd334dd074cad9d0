"""The orders to the jail about a model, and the checks of its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from catenary_agent.partitioning.parts import CACHE_FOLDER, PartName, part_folder
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import ANY, ARRAY_DTYPE_OF
from catenary_services.errors import InvalidInput
from catenary_services.jail.orders import JailLimits
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.block_document import document_of_table, table_of_document
from catenary_services.models.model_repository import ExampleShapes, ModelRepository

_T = TypeVar("_T")
_GIBI = 1 << 30
_MOST_BLOCKS = 4096
_MOST_TENSORS = 4096
_LONGEST_NAME = 1024
_MOST_DIMENSIONS = 32
_LARGEST_SIZE = 1 << 40
Amount = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_SIZE)]
_LIBRARIES = {
    "pytorch_exported": ("torch", "torch.export"),
    "onnxruntime_onnx": ("numpy", "onnx_ir", "onnxruntime"),
}


class SentArray(msgspec.Struct, frozen=True):
    """A tensor to be sent into the jail."""

    datatype: str
    shape: tuple[int, ...]
    content: bytes


class CutOrder(msgspec.Struct, frozen=True):
    """The order to cut a model."""

    key: ModelKey
    platform: str
    file: str
    blocks: int
    smallest_ns: float
    example: dict[str, SentArray]
    dimensions: dict[str, int]
    """Sizes of dimensions that the model leaves free."""
    text_tokens: int = 0
    """The most tokens of a text; with this length the model is measured. 0 if it takes none."""


class PartOrder(msgspec.Struct, frozen=True):
    """The order to write the part of a model between two boundaries."""

    file: str
    table: BlockTable
    ends: PartitionSignature


class WeightRanges(msgspec.Struct, frozen=True):
    """The answer to the question what a part reads of the files beside its graph."""

    files: dict[str, list[tuple[Amount, Amount]]]
    """The offsets and lengths, in bytes, by the name of the file."""


class CutModel(msgspec.Struct, frozen=True):
    """The answer to a `CutOrder`."""

    table: BlockTable
    examples: ExampleShapes


def work_on_model(
    file: Path, platform: str, target: str, job: bytes, wanted: tuple[str, ...] = ()
) -> JailedWork:
    """Returns a job for the jail that reads a model's file and the files beside it.

    Args:
        file: The model; the child finds it by its name in its first input.
        platform: The kind of model, which determines the libraries needed.
        target: The function to run, as "module:function".
        job: The bytes passed to the function.
        wanted: Patterns of the files it may leave.
    """
    size = sum(each.stat().st_size for each in file.parent.iterdir() if each.is_file())
    return JailedWork(
        target=target,
        job=job,
        subject=file.name,
        imports=_LIBRARIES.get(platform, ()),
        inputs=(file.parent, file),
        wanted=wanted,
        # The model, a copy that shows every value, its parts, and its intermediate values.
        limits=JailLimits(
            memory_bytes=16 * _GIBI + 8 * size,
            file_bytes=_GIBI + 2 * size,
            folder_bytes=2 * _GIBI + 4 * size,
        ),
    )


@contextlib.contextmanager
def extracted_part(
    repository: ModelRepository, ends: PartitionSignature, platform: str, variant: str
) -> Iterator[Path]:
    """Yields the folder with `part.onnx` (and `part.data`), or `part.pt2`.

    If the part is not in the cache, it is extracted in the jail.

    Args:
        repository: The repository with the model.
        ends: The part, with the datatypes that its file has.
        platform: The kind of model.
        variant: See `PartName.variant`.

    Raises:
        CatenaryError: The model cannot be read or cut this way.
    """
    model = ends.key.model
    table, file = repository.block_table(model), repository.model_file(model)
    module = "torch_part" if platform == "pytorch_exported" else "onnx_writing"
    wanted = ("part.pt2",) if platform == "pytorch_exported" else ("part.onnx", "part.data")

    def build(folder: Path) -> None:
        job = msgspec.json.encode(PartOrder(file.name, table, ends))
        target = f"catenary_agent.executors.{module}:write_part_in_jail"
        with repository.reading(model) as reading:
            if reading.is_fetched and platform == "onnxruntime_onnx":
                _begin_weights(reading, file, job)
            else:
                reading.begin_own()
            run_jailed(work_on_model(file, platform, target, job, wanted), into=folder)

    # The graph's digest says nothing about weights that lie beside it.
    source = repository.content_digest(model) or table.model_hash
    name = PartName.of(source, (ends.inputs, ends.outputs), variant)
    with part_folder(repository.folder(model) / CACHE_FOLDER, name, build) as folder:
        yield folder


def _begin_weights(reading: VerifiedReading, file: Path, job: bytes) -> None:
    """Brings in the graph of a model, and of the files beside it what a part reads of them.

    Args:
        reading: The reading of a version that is fetched from peers.
        file: The graph.
        job: An encoded `PartOrder`.
    """
    others = set(reading.names()) - {file.relative_to(reading.folder).as_posix()}
    reading.begin(file, first=True)
    work = work_on_model(
        file, "onnxruntime_onnx", "catenary_agent.executors.onnx_writing:weights_in_jail", job
    )
    answer = answer_of(run_jailed(work), WeightRanges, file.name)
    for name in answer.files:
        if name not in others:
            raise InvalidInput(file.name, f"wants weights from {name!r}, which is not recorded")
    for name, ranges in answer.files.items():
        reading.expect(reading.folder / name, ranges)
    for name, ranges in answer.files.items():
        reading.begin(reading.folder / name, ranges)


def answer_of(answer: bytes, kind: type[_T], subject: str) -> _T:
    """Returns the decoded answer of the jail.

    Raises:
        InvalidInput: It is not of that kind, so the model has taken over its reader.
    """
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(subject, f"makes its reader answer nonsense: {error}") from None


def checked_table(table: BlockTable, subject: str) -> BlockTable:
    """Returns a table from the jail after checking it.

    Raises:
        InvalidInput: No model can have such a table.
    """
    table = table_of_document(document_of_table(table), subject)
    tensors = [tensor for boundary in table.boundaries for tensor in boundary.tensors]
    plain = all(
        0 < len(tensor.name) <= _LONGEST_NAME
        and tensor.datatype in ARRAY_DTYPE_OF
        and len(tensor.shape) <= _MOST_DIMENSIONS
        and all(ANY <= size <= _LARGEST_SIZE for size in tensor.shape)
        for tensor in tensors
    )
    if not plain or table.blocks > _MOST_BLOCKS or len(tensors) > _MOST_TENSORS:
        raise InvalidInput(subject, "is cut into blocks that cannot be")
    return table


def checked_examples(examples: ExampleShapes, table: BlockTable, subject: str) -> ExampleShapes:
    """Returns the example shapes of a table's tensors from the jail after checking them.

    Raises:
        InvalidInput: They do not fit the table.
    """
    pairs = [
        (tensor.shape, shape)
        for boundary, row in zip(table.boundaries, examples, strict=False)
        for tensor, shape in zip(boundary.tensors, row, strict=False)
    ]
    complete = len(pairs) == sum(len(boundary.tensors) for boundary in table.boundaries)
    fitting = all(
        len(shape) == len(spec) and all(0 <= size <= _LARGEST_SIZE for size in shape)
        for spec, shape in pairs
    )
    if not complete or not fitting:
        raise InvalidInput(subject, "has example shapes that are not its own")
    return examples
