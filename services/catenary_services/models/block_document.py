"""Conversion between `blocks.json` and the table of a model cut into blocks."""

from __future__ import annotations

from typing import Any

from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import ARRAY_DTYPE_OF
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import check_version, converted, document_of

BLOCKS_FILE = "blocks.json"
VERSION = 1
VERSION_OF_UNITS = 2
"""The version of tables with units, which earlier releases would take for tables of rows."""


def document_of_table(table: BlockTable) -> dict[str, Any]:
    """Returns the JSON form of a table."""
    version = VERSION if table.units is None else VERSION_OF_UNITS
    document = {"version": version, **document_of(table)}
    if not table.kernels:
        del document["kernels"]
    if table.units is None:
        del document["units"]
    document["boundaries"] = [
        {"row_bytes": each["row_bytes"], "tensors": each["tensors"]}
        for each in document["boundaries"]
    ]
    return document


def table_of_document(document: Any, where: str = BLOCKS_FILE) -> BlockTable:
    """Returns the block table in its JSON form.

    Raises:
        InvalidInput: A key is missing, of the wrong type or inconsistent; the field names it.
    """
    has_units = isinstance(document, dict) and document.get("units") is not None
    check_version(document, VERSION_OF_UNITS if has_units else VERSION, where)
    table = converted(document, BlockTable, where)
    for i, boundary in enumerate(table.boundaries):
        for j, tensor in enumerate(boundary.tensors):
            if tensor.datatype not in ARRAY_DTYPE_OF:
                named = f"{where}.boundaries[{i}].tensors[{j}].datatype"
                raise InvalidInput(named, f"{tensor.datatype!r} is not a datatype of tensors")
    if table.blocks < 1 or len(table.compute_ns) != table.blocks:
        raise InvalidInput(f"{where}.compute_ns", "does not have one entry per block")
    if len(table.kernels) not in (0, table.blocks):
        raise InvalidInput(f"{where}.kernels", "does not have one list per block")
    if table.units is not None and not table.batched:
        raise InvalidInput(f"{where}.units", "is only for models that are batched")
    return table
