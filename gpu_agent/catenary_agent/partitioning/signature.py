"""The inputs and outputs of a partition in the form in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import BlockTable, TokenUnits
from catenary_services.domain.tensors import ANY, ARRAY_DTYPE_OF, TensorSpec, zeros
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

Shape = tuple[int, ...]


def wire_boundary(
    table: BlockTable, boundary: int, float16_boundaries: bool
) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a boundary in the form in which they travel.

    Inner FP32 tensors become FP16 if `float16_boundaries`; the model's own inputs and outputs never
    change.
    """
    tensors = table.boundaries[boundary].tensors
    if not float16_boundaries or boundary in (0, table.blocks):
        return tensors
    return tuple(
        TensorSpec(t.name, "FP16", t.shape) if t.datatype == "FP32" else t for t in tensors
    )


@dataclass(frozen=True, slots=True)
class PartitionSignature:
    """The inputs and outputs of a partition in the form in which they travel."""

    key: PartitionKey
    batched: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example_inputs: tuple[Shape, ...]
    """Shapes in the probing run with one row; free dimensions have the size of the probe."""
    example_outputs: tuple[Shape, ...]
    units: TokenUnits | None = None
    """The units of batches, if the model is given texts: every free size behind dimension 0 is then
    the length of the texts. None: rows."""

    @staticmethod
    def of(
        repository: ModelRepository, key: PartitionKey, float16_boundaries: bool
    ) -> PartitionSignature:
        """Returns the inputs and outputs of a partition.

        Raises:
            InvalidInput: `key` is not a non-empty range of the model's blocks.
            ModelNotFound: The model has no block table.
        """
        table = repository.block_table(key.model)
        if not 0 <= key.first_block < key.last_block <= table.blocks:
            text = f"{key} is not a range of the model's {table.blocks} blocks"
            raise InvalidInput("partition", text)
        examples = repository.example_shapes(key.model)
        return PartitionSignature(
            key=key,
            batched=table.batched,
            inputs=wire_boundary(table, key.first_block, float16_boundaries),
            outputs=wire_boundary(table, key.last_block, float16_boundaries),
            example_inputs=examples[key.first_block],
            example_outputs=examples[key.last_block],
            units=table.units,
        )

    def example_arrays(self, rows: int, tokens: int = 0) -> list[np.ndarray]:
        """Returns inputs of the example shapes, with `rows` rows if batched.

        Floating-point values are random, others are zero; texts are empty. Free sizes are `tokens`
        if that is not 0.
        """
        generator = np.random.default_rng(0)
        arrays = []
        for spec, example in zip(self.inputs, self.example_inputs, strict=True):
            sizes = list(example)
            if tokens:
                sizes = [
                    tokens if free == ANY else size
                    for free, size in zip(spec.shape, example, strict=True)
                ]
            shape = (rows, *sizes[1:]) if self.batched else example
            dtype = ARRAY_DTYPE_OF[spec.datatype]
            is_float = dtype.kind == "f"
            arrays.append(
                generator.random(shape).astype(dtype) if is_float else zeros(spec.datatype, shape)
            )
        return arrays

    def batch_size(self, inputs: Sequence[np.ndarray]) -> int:
        """Returns the batch size of `inputs`, in rows or units; 1 if it is not batched."""
        rows = int(inputs[0].shape[0]) if self.batched else 1
        if self.units is None:
            return rows
        free = (
            size
            for spec, array in zip(self.inputs, inputs, strict=True)
            for named, size in zip(spec.shape[1:], array.shape[1:], strict=True)
            if named == ANY
        )
        return self.units.of(rows, self.units.counted(next(free, self.units.text_tokens)))
