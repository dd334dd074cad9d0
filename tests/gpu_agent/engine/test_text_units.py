"""Partitions whose batches are counted in tokens: what is measured, and what is let in."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from catenary_agent.engine.inbound.intake import check_rows, check_texts
from catenary_agent.engine.partitions import LoadedPartition
from catenary_agent.executors.device import Device
from catenary_agent.executors.emulated import EmulatedPart
from catenary_agent.hosting.measuring import measure_between_batches
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import BlockTable, Boundary, TokenUnits
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput
from tests.support.agent_harness import MODEL, ScriptedExecutor, header

KEY = PartitionKey(MODEL, 0, 1)
UNITS = TokenUnits(16, 64)
HIDDEN = TensorSpec("hidden", "FP32", (ANY, ANY, 3))
MASK = TensorSpec("mask", "INT64", (ANY, 1, ANY))
ENDS = PartitionSignature(
    KEY, True, (HIDDEN, MASK), (HIDDEN,), ((1, 64, 3), (1, 1, 64)), ((1, 64, 3),), UNITS
)


class Measured(ScriptedExecutor):
    """Notes the shapes it is run with, and takes longest with long rows."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.ends = ENDS
        self.shapes: list[tuple[int, int]] = []

    def run(self, inputs, outputs=None):
        hidden, mask = inputs
        assert mask.shape == (len(hidden), 1, hidden.shape[1])
        self.shapes.append(hidden.shape[:2])
        return [hidden]


async def test_each_size_is_measured_with_few_long_rows_and_with_many_short_ones() -> None:
    executor = Measured()
    times = await measure_between_batches(executor, 2, asyncio.to_thread)
    assert len(times) == 8  # two texts of full length
    assert list(times) == sorted(times)
    seen = list(dict.fromkeys(executor.shapes))
    assert seen == [
        (1, 16),
        (2, 8),
        (1, 32),
        (4, 8),
        (1, 48),
        (6, 8),
        (1, 64),
        (8, 8),
        (2, 64),
        (16, 8),
    ]


async def test_sizes_that_the_model_refuses_are_left_out_unless_they_are_all() -> None:
    executor = Measured()
    whole = executor.run

    def refusing(inputs, outputs=None):
        if inputs[0].shape[1] < least:
            raise InvalidInput("hidden", "the model refuses this size")
        return whole(inputs, outputs)

    executor.run = refusing
    least = 16
    times = await measure_between_batches(executor, 1, asyncio.to_thread)
    assert len(times) == 4
    assert set(executor.shapes) == {(1, 16), (1, 32), (1, 48), (1, 64)}
    least = 100
    with pytest.raises(InvalidInput, match="refuses"):
        await measure_between_batches(executor, 1, asyncio.to_thread)


def emulated(units: TokenUnits | None) -> EmulatedPart:
    boundaries = (Boundary((HIDDEN, MASK), 1), Boundary((HIDDEN,), 1))
    table = BlockTable("h", True, boundaries, (1,), units=units)
    times = DeviceProfile("T4", 1, False, "", (1, 2, 4), ((100, 120, 200),), ((0, 0, 0),))
    profile = ModelProfile(MODEL, "h", 1, (0, 0), (5,), (times,))
    device = Device.parse("emulated:T4")
    return EmulatedPart(replace(ENDS, units=units), table, device, profile)


async def test_emulated_devices_take_times_between_those_of_texts_of_full_length() -> None:
    part = emulated(UNITS)
    times = await measure_between_batches(part, 2, asyncio.to_thread)
    assert times == (85, 90, 95, 100, 105, 110, 115, 120)
    assert await measure_between_batches(emulated(None), 4, asyncio.to_thread) == (
        *(100, 120, 160, 200),
    )
    ends = part.ends
    assert ends.batch_size(ends.example_arrays(3, 33)) == 7
    assert ends.batch_size(ends.example_arrays(3, 2)) == 2
    assert ends.batch_size(ends.example_arrays(2)) == 8


def sent(rows: int, tokens: int) -> dict[str, np.ndarray]:
    return {
        "hidden": np.zeros((rows, tokens, 3), np.float32),
        "mask": np.zeros((rows, 1, tokens), np.int64),
    }


def test_more_than_was_measured_is_refused() -> None:
    executor = Measured()
    executor.inputs = (HIDDEN, MASK)
    partition = LoadedPartition(executor, False, 2, pads=True, units=UNITS)
    assert (partition.most_units, partition.most_rows) == (8, 16)
    check_rows(header(rows=16), partition)
    with pytest.raises(InvalidInput, match="17; this partition takes 1 to 16"):
        check_rows(header(rows=17), partition)
    for rows, tokens in ((2, 64), (16, 8), (5, 25)):
        check_texts(sent(rows, tokens), partition, rows)
    for rows, tokens in ((1, 65), (3, 43)):
        with pytest.raises(InvalidInput, match=rf"{rows} texts of {tokens} tokens"):
            check_texts(sent(rows, tokens), partition, rows)
    without = LoadedPartition(executor, False, 2, pads=True)
    check_texts(sent(3, 100), without, 3)
