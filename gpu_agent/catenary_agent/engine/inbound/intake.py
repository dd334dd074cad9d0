"""Checks of a frame before its tensors reach an executor. They are pure and keep no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from catenary_services.domain.tensors import ANY, ARRAY_DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput, PartitionLost, StaleEpoch
from catenary_services.security.identity import Role

if TYPE_CHECKING:
    from catenary_agent.engine.batch import ReceivedTensor
    from catenary_agent.engine.partitions import LoadedPartition
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from catenary_services.transport.interface import FrameSender

MAX_HOPS = 256
MAX_SLICES = 65_536


def is_planned(header: frame_pb2.FrameHeader, sender: FrameSender) -> bool:
    """Returns True if a feature map comes from the sender that its route names.

    That is the agent of the previous hop, and for the first hop the gateway that is to be answered.
    A frame of any other sender is dropped without an error, because the error would fail the batch.
    """
    if not sender.name:
        return True  # the frame was made in this process
    if header.position == 0:
        is_agent = sender.role is Role.AGENT
        return not is_agent and all(piece.gateway_id == sender.name for piece in header.slices)
    if header.position > len(header.route):
        return False
    return header.route[header.position - 1].agent_id == sender.name


def check_route(header: frame_pb2.FrameHeader, agent_id: str, epoch: int) -> common_pb2.Hop:
    """Returns the hop of this agent.

    Only the first hop is fenced by the epoch: what a former leader has started may finish, but
    nothing new of it may begin.

    Raises:
        StaleEpoch: The batch begins here, and a newer scheduler leads.
        InvalidInput: The route is malformed or does not lead to this agent.
    """
    if not 0 < len(header.route) <= MAX_HOPS:
        raise InvalidInput("route", f"{len(header.route)} hops; 1 to {MAX_HOPS} are allowed")
    if header.position >= len(header.route):
        raise InvalidInput("position", f"{header.position} is behind the end of the route")
    hop = header.route[header.position]
    if hop.agent_id != agent_id:
        raise InvalidInput("route", f"this hop belongs to {hop.agent_id!r}, not to {agent_id!r}")
    if header.position == 0 and header.epoch < epoch:
        raise StaleEpoch(f"epoch {header.epoch} is over; this agent obeys {epoch}")
    return hop


def check_rows(header: frame_pb2.FrameHeader, partition: LoadedPartition) -> None:
    """Checks the rows of the batch that the frame claims to carry, and their receivers.

    Raises:
        InvalidInput: The named field contradicts the others or the partition.
    """
    if not 0 < header.batch_rows <= partition.most_rows:
        raise InvalidInput(
            "batch_rows", f"{header.batch_rows}; this partition takes 1 to {partition.most_rows}"
        )
    if header.rows == 0 or header.first_row + header.rows > header.batch_rows:
        raise InvalidInput(
            "rows",
            f"[{header.first_row}, {header.first_row + header.rows}) of {header.batch_rows} rows",
        )
    if header.position > 0 and header.rows != header.batch_rows:
        raise InvalidInput("rows", "hops after the first take whole batches")
    check_slices(header.slices, header.first_row, header.rows)


def check_slices(slices: Sequence[common_pb2.Slice], first_row: int, rows: int) -> None:
    """Checks that `slices` cover `rows` rows from `first_row` on, in order and without gaps.

    Raises:
        InvalidInput: The slices do not, or are too many, or one names no gateway.
    """
    if len(slices) > MAX_SLICES:
        raise InvalidInput("slices", f"{len(slices)} slices; {MAX_SLICES} are allowed")
    row = first_row
    for index, piece in enumerate(slices):
        if piece.batch_row != row or piece.rows == 0:
            raise InvalidInput(
                f"slices[{index}]", f"{piece.rows} rows at {piece.batch_row}; expected row {row}"
            )
        if not piece.gateway_id:
            raise InvalidInput(f"slices[{index}].gateway_id", "missing: nobody to answer to")
        row += piece.rows
    if row != first_row + rows:
        raise InvalidInput("slices", f"cover {row - first_row} of {rows} rows")


def check_tensors(
    tensors: Mapping[str, ReceivedTensor], specs: Sequence[TensorSpec], rows: int | None
) -> None:
    """Checks names, datatypes and shapes against the inputs of a partition.

    Args:
        tensors: The received tensors by name.
        specs: The inputs of the partition in the form in which they travel.
        rows: Expected size of dimension 0; None if the model is not batched.

    Raises:
        InvalidInput: The named tensor is missing or wrong.
    """
    if len(tensors) != len(specs):
        raise InvalidInput(
            "tensors", f"{sorted(tensors)} arrived; expected {[spec.name for spec in specs]}"
        )
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise InvalidInput("tensors", f"{spec.name!r} is missing")
        expected = ARRAY_DTYPE_OF.get(spec.datatype)
        if expected is None or tensor.dtype != expected:
            raise InvalidInput(
                f"tensors[{spec.name}].datatype", f"{tensor.dtype}; expected {spec.datatype}"
            )
        _check_shape(spec, tensor.shape, rows)


def check_texts(
    tensors: Mapping[str, ReceivedTensor], partition: LoadedPartition, rows: int
) -> None:
    """Checks that rows of texts are no longer, and together no larger, than this partition takes.

    Raises:
        InvalidInput: They are; the tensor is named.
    """
    units = partition.units
    if units is None:
        return
    for spec in partition.executor.inputs:
        sizes = zip(spec.shape[1:], tensors[spec.name].shape[1:], strict=True)
        tokens = max((size for named, size in sizes if named == ANY), default=0)
        if tokens > units.text_tokens or units.of(rows, tokens) > partition.most_units:
            raise InvalidInput(
                f"tensors[{spec.name}].shape",
                f"{rows} texts of {tokens} tokens; this partition takes texts of"
                f" {units.text_tokens}, and {partition.most_units * units.tokens} tokens in all",
            )


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], rows: int | None) -> None:
    expected = spec.shape if rows is None else (rows, *spec.shape[1:])
    fits = len(shape) == len(expected) and all(
        want in (ANY, size) for want, size in zip(expected, shape, strict=True)
    )
    if not fits:
        raise InvalidInput(f"tensors[{spec.name}].shape", f"{list(shape)}; expected {expected}")


def not_loaded(hop: common_pb2.Hop, agent_id: str) -> PartitionLost:
    """Returns the error for a hop whose partition is not here, after a restart or a new plan."""
    blocks = f"{hop.model}:{hop.model_version}[{hop.first_block},{hop.last_block})"
    return PartitionLost(f"{blocks} is not loaded on {agent_id}")


def contradiction(first_rows: int, rows: int) -> InvalidInput:
    """Returns the error for frames of one batch that describe it differently."""
    return InvalidInput("batch_rows", f"{rows} after {first_rows} rows for the same batch")
