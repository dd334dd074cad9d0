"""The executor interface, and the checks that all executors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from catenary_agent.devices.device_errors import of_executor
from catenary_agent.partitioning.signature import PartitionSignature, Shape
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.tensors import ANY, ARRAY_DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput


class Executor(Protocol):
    """An executor of one partition. It is not thread-safe: one thread at a time calls it."""

    key: PartitionKey
    memory_bytes: int
    """The bytes of the weights, as far as known when they were loaded."""
    ends: PartitionSignature
    """The inputs and outputs, with example shapes."""
    batched: bool
    """True if dimension 0 of every tensor is the batch; else a call is one request."""
    inputs: tuple[TensorSpec, ...]
    """The inputs in the datatypes in which they travel: FP16 where the boundary is cast."""
    outputs: tuple[TensorSpec, ...]
    is_tied_to_thread: bool
    """Whether it is always the same thread that has to call it."""

    def output_shapes(self, input_shapes: Sequence[Shape]) -> list[Shape] | None:
        """Returns the output shapes for these input shapes; None if only a run can tell."""
        ...

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Returns the outputs in the datatypes in which they travel.

        Args:
            inputs: One array per entry of `inputs`, C-contiguous for speed.
            outputs: Arrays to write the results to, in the shapes of `output_shapes`; they are
                returned. Without them the results are new arrays, or views of inputs that are
                passed through.

        Raises:
            InvalidInput: The datatype or shape of an array is wrong; the field is its name.
        """
        ...

    def close(self) -> None:
        """Frees the weights; the executor is unusable afterwards."""
        ...


def check_arrays(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], batched: bool) -> None:
    """Raises InvalidInput naming the first array that does not fit its spec."""
    if len(arrays) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise InvalidInput("tensors", f"{len(arrays)} given, {len(specs)} expected: {names}")
    for spec, array in zip(specs, arrays, strict=True):
        if array.dtype != ARRAY_DTYPE_OF[spec.datatype]:
            raise InvalidInput(spec.name, f"has datatype {array.dtype}, expected {spec.datatype}")
        if len(array.shape) != len(spec.shape) or any(
            want not in (ANY, size) for want, size in zip(spec.shape, array.shape, strict=True)
        ):
            raise InvalidInput(
                spec.name, f"has shape {list(array.shape)}, expected {list(spec.shape)}"
            )
        if batched and (array.shape[0] != arrays[0].shape[0] or array.shape[0] < 1):
            raise InvalidInput(
                spec.name, f"has {array.shape[0]} rows, {specs[0].name} has {arrays[0].shape[0]}"
            )


def check_outputs(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
    """Raises InvalidInput unless `arrays` can receive results in place."""
    check_arrays(specs, arrays, batched=False)
    for spec, array in zip(specs, arrays, strict=True):
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidInput(spec.name, "output buffer is not contiguous and writable")


class PartExecutor:
    """The part of an executor that is alike in all kinds of them; see `Executor`."""

    def __init__(self, ends: PartitionSignature) -> None:
        self.ends = ends
        self.key = ends.key
        self.batched = ends.batched
        self.inputs = ends.inputs
        self.outputs = ends.outputs
        self.is_tied_to_thread = True

    def output_shapes(self, input_shapes: Sequence[Shape]) -> list[Shape] | None:
        """Returns the output shapes that follow from the specs alone; None if they do not."""
        named = zip(self.inputs, input_shapes, strict=True)
        given = {spec.name: tuple(shape) for spec, shape in named}
        shapes = []
        for spec in self.outputs:
            shape = given.get(spec.name, spec.shape)
            if self.batched:
                shape = (input_shapes[0][0], *shape[1:])
            if ANY in shape:
                return None
            shapes.append(shape)
        return shapes

    def _failure(self, error: Exception) -> Exception:
        """Returns the error for a failed run.

        Shapes and datatypes were checked, so a free size that the model cannot compute may remain.
        """
        text = (str(error).splitlines() or [""])[0][:300]
        refused = None
        if any(ANY in spec.shape[1 if self.batched else 0 :] for spec in self.inputs):
            refused = InvalidInput(self.inputs[0].name, f"the model refuses this size: {text}")
        return of_executor(error, str(self.key), refused)
