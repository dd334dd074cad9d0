"""Writes the part of an ONNX model that an executor loads.

It is a module of its own because what edits graphs takes 40 MB. Parts are written by a process of
their own, the jail, and none that serves needs to import it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx_ir as ir

from catenary_agent.executors.onnx_part import CAST
from catenary_agent.partitioning.jailed import PartOrder, WeightRanges
from catenary_agent.partitioning.onnx_file import external_tensors
from catenary_agent.partitioning.onnx_graph import (
    OnnxModel,
    extract_part,
    load_onnx,
    with_float16_ends,
)
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.words import words
from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import TensorSpec
from catenary_services.jail.child import JailWorkspace

_DATA_DEPENDENT = words("""
    Compress If Loop NonMaxSuppression NonZero Range Scan StringSplit TopK Unique
""")
_EXTERNAL_BYTES = 64 << 20
"""Parts above this size keep their weights in a second file: a session maps it, and need not hold
the bytes of the graph beside them. A protobuf ends at 2 GiB."""


def write_part_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Writes the part of an encoded `PartOrder`."""
    order = msgspec.json.decode(job, type=PartOrder)
    write_part(load_onnx(room.inputs[0] / order.file), order.table, order.ends, room.output)
    return b""


def weights_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Returns what the part of an encoded `PartOrder` reads of the files beside the graph."""
    order = msgspec.json.decode(job, type=PartOrder)
    source = load_onnx(room.inputs[0] / order.file)
    part, _, _ = _cut_part(source, order.table, order.ends)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for tensor in external_tensors(part):
        span = (tensor.offset or 0, tensor.length or tensor.nbytes)
        ranges.setdefault(str(tensor.location), []).append(span)
    return msgspec.json.encode(WeightRanges(ranges))


def _cut_part(
    source: OnnxModel, table: BlockTable, ends: PartitionSignature
) -> tuple[ir.Model, tuple[TensorSpec, ...], list[TensorSpec]]:
    """Returns the part of a range of blocks, and the tensors at its two ends."""
    given = table.boundaries[ends.key.first_block].tensors
    names = {spec.name for spec in given}
    wanted = [t for t in table.boundaries[ends.key.last_block].tensors if t.name not in names]
    return extract_part(source, given, wanted), given, wanted


def write_part(
    source: OnnxModel, table: BlockTable, ends: PartitionSignature, folder: Path
) -> None:
    """Writes `part.onnx` (and, if large, `part.data`) for a range of blocks into `folder`."""
    part, given, wanted = _cut_part(source, table, ends)
    repeat = not any(node.op_type in _DATA_DEPENDENT for node in part.graph.all_nodes())
    part.metadata_props["shapes_repeat"] = "1" if repeat else "0"
    inner = [{t.name for t in end if t.datatype == "FP32"} for end in (given, wanted)]
    wire = [{t.name for t in end if t.datatype == "FP16"} for end in (ends.inputs, ends.outputs)]
    with_float16_ends(part, inner[0] & wire[0], inner[1] & wire[1], CAST)
    size = sum(t.const_value.nbytes for t in part.graph.initializers.values() if t.const_value)
    is_large = size > _EXTERNAL_BYTES
    if not is_large:  # weights that the model keeps in another file come into the part
        part = ir.external_data.load_to_model(part)
    ir.save(part, folder / "part.onnx", external_data="part.data" if is_large else None)
