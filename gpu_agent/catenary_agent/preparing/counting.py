"""Counts of the work in a model's blocks, whatever format the model has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.domain.model import BlockCosts, BlockTable


def count_kernels(
    platform: str, file: Path, table: BlockTable, blocks: Sequence[PartitionSignature]
) -> BlockCosts:
    """Returns the kernels of every block for one row; it reads the model, so it runs in the jail.

    Args:
        platform: The kind of model.
        file: The model's file.
        table: The blocks it is cut into.
        blocks: What enters and leaves each block, without float16.
    """
    if platform == "pytorch_exported":
        from catenary_agent.preparing.torch_costs import count_torch

        return count_torch(file, blocks)
    from catenary_agent.preparing.onnx_costs import count_onnx

    return count_onnx(file, table, blocks)
