"""Readers for the tables of a data set: CSV and JSON texts to numbers, with clear errors."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from catenary_scheduler.planning.pooled.problem import BlockTimes, Device
from catenary_services.errors import InvalidInput

ReadText = Callable[[str], str | None]
"""Returns the text of a file by its name inside the data set; None if there is no such file."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns exceptions that a malformed entry causes into InvalidInput, which names the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(name, f"has an entry that cannot be read ({error!r})") from error


TIMING_COLUMNS = ("dnn", "gpu", "vgpus_per_gpu", "block", "us_b1")
CUT_COLUMNS = ("dnn", "cut_before_block", "bytes_per_request")


def _text(read_text: ReadText, name: str) -> str:
    text = read_text(name)
    if text is None:
        raise InvalidInput("dataset", f"{name} is missing")
    return text


def csv_rows(read_text: ReadText, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Returns the rows of a CSV file.

    Raises InvalidInput if it has no rows or lacks one of `columns`.
    """
    rows = list(csv.DictReader(io.StringIO(_text(read_text, name))))
    if not rows:
        raise InvalidInput(name, "has no rows")
    for column in columns:
        if rows[0].get(column) is None:
            raise InvalidInput(name, f"has no column {column}")
    return rows


def json_of(read_text: ReadText, name: str) -> Any:
    """Returns the content of a JSON file. Raises InvalidInput if it is missing or malformed."""
    return parse_json(name, _text(read_text, name))


def parse_json(name: str, text: str) -> Any:
    """Returns the content of a JSON text.

    Raises InvalidInput, which names the file, if it is malformed.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(name, f"is not JSON: {error}") from error


def entry_of(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """Returns the value of a key that a mapping must have. Raises InvalidInput if it is missing."""
    if key not in mapping:
        raise InvalidInput(where, f"an entry has no {key!r}")
    return mapping[key]


def block_times(
    rows: Sequence[Mapping[str, str]], blocks: Mapping[str, int]
) -> dict[str, dict[Device, BlockTimes]]:
    """Returns the latencies of each model by device; `blocks` are the models' numbers of blocks."""
    batch_columns = _batch_columns(rows[0])
    found: dict[tuple[str, Device], dict[int, list[float]]] = {}
    for row in rows:
        times = []
        for column in batch_columns:
            if not row[column]:  # the profile ends at this batch size
                break
            times.append(max(float(row[column]), 1.0))  # as in the artifact, no block is free
        device = (row["gpu"], int(row["vgpus_per_gpu"]))
        found.setdefault((row["dnn"], device), {})[int(row["block"])] = times
    tables: dict[str, dict[Device, BlockTimes]] = {name: {} for name in blocks}
    for (name, device), by_block in found.items():
        if name not in blocks:
            continue
        if sorted(by_block) != list(range(blocks[name])):
            raise InvalidInput("block_timing.csv", f"{name} on {device[0]}: blocks are missing")
        # A batch size counts only if every block was measured with it.
        batches = min(len(times) for times in by_block.values())
        if batches > 0:
            tables[name][device] = np.array(
                [by_block[block][:batches] for block in sorted(by_block)], dtype=np.float64
            )
    return tables


def _batch_columns(row: Mapping[str, str]) -> list[str]:
    columns: list[str] = []
    while f"us_b{len(columns) + 1}" in row:
        columns.append(f"us_b{len(columns) + 1}")
    return columns


def cut_bytes_of(
    rows: Sequence[Mapping[str, str]], blocks: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Returns the bytes at every cut of each model. Models that lack some are left out."""
    sizes = {name: [-1] * (count + 1) for name, count in blocks.items()}
    for row in rows:
        cuts, cut = sizes.get(row["dnn"]), int(row["cut_before_block"])
        if cuts is None:  # the model is not listed
            continue
        if not 0 <= cut < len(cuts):
            raise InvalidInput("cut_bytes.csv", f"{row['dnn']} has no cut {cut}")
        cuts[cut] = int(row["bytes_per_request"])
    for cuts in sizes.values():
        cuts[0] = cuts[-1] = 0  # input and output of a model cross no cut
    return {name: tuple(cuts) for name, cuts in sizes.items() if min(cuts) >= 0}
