"""An executor without weights: it sleeps as long as a device would compute, and returns zeros.

Times come from the model's profile (`catenary_services.domain.profile`) for the device's class and
virtual level. Beyond the profile's largest batch they grow by the last step. A class of the
catalogue that the profile does not have takes the times that are estimated from its data sheet, if
the kernels of the model are counted. For all others the block table's own times are multiplied by
the batch size. A class that the profile has at other levels only is refused: a guess of how a
shared device behaves would look like a measurement. `slowdown` multiplies all of this; with 0 it
never sleeps.

A file of times in nanoseconds at batch 1, 2, .. takes precedence over the profile:

    {"efficientnet-lite0": {"0-4": [2100000, 3500000], "4": [600000, 900000], "5": [...]}}

"first-last" is a partition `[first, last)`, a single number one block; a partition that is not
listed takes the sum of its blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from catenary_agent.executors.base import PartExecutor, check_arrays, check_outputs
from catenary_agent.executors.device import Device
from catenary_agent.partitioning.signature import PartitionSignature, Shape
from catenary_services.devices.catalogue import find_device_class
from catenary_services.devices.roofline import estimate
from catenary_services.domain.model import BlockTable
from catenary_services.domain.profile import ModelProfile
from catenary_services.domain.tensors import zeros
from catenary_services.errors import InvalidInput, NotSupported

_Times = dict[str, tuple[int, ...]]
_ESTIMATED = (1, 2, 4, 8, 16, 32)
"""Batch sizes of estimates; between them and beyond the last, times are on a line."""


class EmulatedPart(PartExecutor):
    """An executor that sleeps instead of computing."""

    def __init__(
        self,
        ends: PartitionSignature,
        table: BlockTable,
        device: Device,
        profile: ModelProfile | None = None,
    ) -> None:
        """Takes its times from the file of times, the profile or the table, in this order.

        Raises:
            NotSupported: `profile` has the device's class, but not at its virtual level.
            InvalidInput: The device's file of times is malformed.
        """
        super().__init__(ends)
        first, last = ends.key.first_block, ends.key.last_block
        self.memory_bytes = sum(profile.block_weight_bytes[first:last]) if profile else 0
        self._slowdown = device.slowdown
        self._own_ns = sum(table.compute_ns[first:last])
        self._profile = _profile_of(device.profile, ends.key.model.name)
        # The file takes precedence, so times that the profile lacks do not matter then.
        self._profiled = () if self._profile else _profiled_times(profile, device, first, last)
        if not self._profile and not self._profiled:
            self._profiled = _estimated_times(table, device, first, last)

    def compute_ns(self, rows: int) -> int:
        """Returns the nanoseconds of a batch of `rows` rows on the emulated device."""
        first, last = self.key.first_block, self.key.last_block
        whole = self._profile.get(f"{first}-{last}")
        blocks = [self._profile.get(str(block)) for block in range(first, last)]
        if whole is not None:
            spent = _at(whole, rows)
        elif self._profile and all(times is not None for times in blocks):
            spent = sum(_at(times, rows) for times in blocks if times is not None)
        elif self._profiled:
            spent = _at(self._profiled, rows)
        else:
            spent = self._own_ns * rows
        return round(spent * self._slowdown)

    def times(self, sizes: int) -> tuple[int, ...]:
        """Returns nanoseconds at batch 1, 2, .. `sizes`, in rows or in units."""
        return tuple(self.size_ns(size) for size in range(1, sizes + 1))

    def size_ns(self, size: int) -> int:
        """Returns the nanoseconds of a batch of so many rows, or so many units.

        What is known are times of texts of full length; between and below them is a line.
        """
        units = self.ends.units
        if units is None:
            return self.compute_ns(size)
        texts = size * units.tokens / units.text_tokens
        whole = max(1, int(texts))
        below, above = self.compute_ns(whole), self.compute_ns(whole + 1)
        return max(0, round(below + (texts - whole) * (above - below)))

    def output_shapes(self, input_shapes: Sequence[Shape]) -> list[Shape] | None:
        """Returns the shapes in the specs; where a size is free, that of the probe's example."""
        shapes = super().output_shapes(input_shapes)
        if shapes is None:
            named = zip(self.inputs, input_shapes, strict=True)
            given = {spec.name: tuple(shape) for spec, shape in named}
            pairs = zip(self.outputs, self.ends.example_outputs, strict=True)
            shapes = [given.get(spec.name, example) for spec, example in pairs]
            if self.batched:
                shapes = [(input_shapes[0][0], *shape[1:]) for shape in shapes]
        return shapes

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Returns zeros, and inputs passed through, after the emulated time; see `Executor.run`."""
        started = time.perf_counter_ns()
        check_arrays(self.inputs, inputs, self.batched)
        shapes = self.output_shapes([array.shape for array in inputs])
        assert shapes is not None
        if outputs is None:
            results = [
                zeros(spec.datatype, shape)
                for spec, shape in zip(self.outputs, shapes, strict=True)
            ]
        else:
            results = list(outputs)
            check_outputs(self.outputs, results)
        given = {spec.name: array for spec, array in zip(self.inputs, inputs, strict=True)}
        for spec, result in zip(self.outputs, results, strict=True):
            result[...] = given.get(spec.name, zeros(spec.datatype, ()))
        left_ns = self.size_ns(self.ends.batch_size(inputs)) - (time.perf_counter_ns() - started)
        if self._slowdown > 0 and left_ns > 0:
            time.sleep(left_ns / 1e9)
        return results

    def close(self) -> None:
        """Does nothing, as no weights are held."""


def _profiled_times(
    profile: ModelProfile | None, device: Device, first: int, last: int
) -> tuple[int, ...]:
    """Returns times at batch 1, 2, ..; () if the profile does not know this class of device.

    Raises:
        NotSupported: The profile knows the class, but not at this virtual level.
    """
    levels = profile.levels(device.device_class) if profile is not None else ()
    if profile is None or not levels:
        return ()
    if device.virtual_level not in levels:
        raise NotSupported(
            f"{device}: the profile of {profile.model} has times for {levels} virtual GPUs per"
            f" device, not for {device.virtual_level}"
        )
    return profile.compute_ns(device.device_class, device.virtual_level, first, last)


def _estimated_times(table: BlockTable, device: Device, first: int, last: int) -> tuple[int, ...]:
    """Returns times at batch 1, 2, .. from the data sheet; () if it or the kernels are unknown."""
    known = find_device_class(device.device_class)
    if known is None or not table.kernels:
        return ()
    sizes = _ESTIMATED if table.batched else (1,)
    times = estimate(table.kernels[first:last], known, device.virtual_level, sizes)
    return times.compute_ns(0, last - first)


def _at(times: tuple[int, ...], rows: int) -> int:
    if rows <= len(times):
        return times[rows - 1]
    step = times[-1] - times[-2] if len(times) > 1 else times[0]
    return times[-1] + (rows - len(times)) * max(0, step)


def _profile_of(path: Path | None, model: str) -> _Times:
    if path is None:
        return {}
    where = f"emulated_profile {path.name}"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(where, f"cannot be read: {error}") from None
    entry = document.get(model, {}) if isinstance(document, dict) else None
    if not isinstance(entry, dict):
        raise InvalidInput(where, "is not an object of objects")
    profile = {}
    for blocks, times in entry.items():
        good = isinstance(times, list) and times and all(type(t) is int and t >= 0 for t in times)
        if not good:
            raise InvalidInput(f"{where} {model}.{blocks}", "is not a list of nanoseconds")
        profile[blocks] = tuple(times)
    return profile
