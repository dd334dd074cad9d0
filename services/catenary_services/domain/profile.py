"""A model's cost on each class of device, block by block: the input of the planner.

A *profile* holds, per device class and virtual-GPU level, the time of every block at some batch
sizes, taken while all virtual GPUs of the device were busy; and, whatever the device, the bytes
that cross each cut and the weights of each block. Times are measured (`catenaryd profile`) or, for
hardware one does not have, estimated; an estimate says so wherever it goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.model import BlockTable
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import field, integers

PROFILE_FORMAT = "catenary-profile"
PROFILE_VERSION = 1

BlockTimes = tuple[tuple[Nanoseconds, ...], ...]
"""One row of times per block, with one entry per entry of `batch_sizes`."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Block times on one virtual GPU of a device class while all its siblings are busy."""

    device_class: str
    virtual_level: int
    """The number of virtual GPUs the device is divided into."""
    estimated: bool
    """True if nothing was run and the times come from a model of the hardware."""
    source: str
    """Source of the times in words: what measured or estimated them, with which settings."""
    batch_sizes: tuple[int, ...]
    """Batch sizes the times are known for, ascending from 1."""
    p50_ns: BlockTimes
    p95_ns: BlockTimes

    @property
    def identity(self) -> tuple[str, int]:
        """Class and level; a model's profile has at most one entry of each such pair."""
        return self.device_class, self.virtual_level

    def compute_ns(self, first: int, last: int) -> tuple[Nanoseconds, ...]:
        """Returns the times of blocks `[first, last)` at batch 1, 2, .. the largest in the profile.

        A time is the sum of the blocks' medians, interpolated linearly between measured batch
        sizes. It never falls with the batch size: a larger batch that looks faster is noise, and
        dispatch relies on the order.
        """
        sums = [sum(times) for times in zip(*self.p50_ns[first:last], strict=True)]
        rising = list(itertools.accumulate(sums, max))
        times = [rising[0]]
        for (left, below), (right, above) in itertools.pairwise(
            zip(self.batch_sizes, rising, strict=True)
        ):
            span = right - left
            times += [
                below + ((above - below) * step + span // 2) // span for step in range(1, span + 1)
            ]
        return tuple(times)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The cost of one model: times per device class and level, bytes per cut and per block."""

    model: ModelKey
    model_hash: str
    """SHA-256 of the model file. The times of another file say nothing about this one."""
    blocks: int
    cut_row_bytes: tuple[int, ...]
    """Bytes of one row on the wire in front of block i, `blocks + 1` entries; 0 at both ends."""
    block_weight_bytes: tuple[int, ...]
    devices: tuple[DeviceProfile, ...]
    cut_tensors: tuple[tuple[str, ...], ...] = ()
    """Names of the tensors at each of the `blocks + 1` boundaries; () if unknown."""

    def device(self, device_class: str, level: int) -> DeviceProfile | None:
        """Returns the times of a class at a level, None if there are none."""
        wanted = (device_class, level)
        return next((device for device in self.devices if device.identity == wanted), None)

    def levels(self, device_class: str) -> tuple[int, ...]:
        """Returns the levels at which the times of a class are known, ascending."""
        known = (d.virtual_level for d in self.devices if d.device_class == device_class)
        return tuple(sorted(known))

    def is_cut_like(self, table: BlockTable) -> bool:
        """Returns True if this profile and a block table divide the model into the same blocks."""
        if self.blocks != table.blocks:
            return False
        return not self.cut_tensors or self.cut_tensors == tensors_at_cuts(table)

    def compute_ns(
        self, device_class: str, level: int, first: int, last: int
    ) -> tuple[Nanoseconds, ...]:
        """Returns the time of blocks `[first, last)` at batch 1, 2, ..; index 0 is batch 1.

        Raises:
            InvalidInput: If `[first, last)` is not a non-empty range of blocks, or the profile
                has no times of this class and level.
        """
        if not 0 <= first < last <= self.blocks:
            raise InvalidInput("blocks", f"[{first}, {last}) is no range of {self.blocks} blocks")
        device = self.device(device_class, level)
        if device is None:
            raise InvalidInput(
                "device_class",
                f"the profile of {self.model} has no times of {device_class!r} with {level} virtual"
                f" GPU{'s' if level > 1 else ''} per device",
            )
        return device.compute_ns(first, last)

    def with_devices(self, devices: Iterable[DeviceProfile]) -> ModelProfile:
        """Returns this profile with further times, which replace those of the same class and level.

        The times are sorted by class and level, so that equal measurements give equal documents.
        """
        known = {device.identity: device for device in (*self.devices, *devices)}
        return replace(self, devices=tuple(known[each] for each in sorted(known)))


def tensors_at_cuts(table: BlockTable) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the tensors at each boundary."""
    return tuple(tuple(t.name for t in boundary.tensors) for boundary in table.boundaries)


def merged(a: ModelProfile, b: ModelProfile) -> ModelProfile:
    """Returns a profile with the times of both; those of `b` where both know a class and level.

    Measured times are never replaced by estimates.

    Raises:
        InvalidInput: The profiles are of different model files or of different cuts.
    """
    for name in ("model_hash", "blocks", "cut_row_bytes", "cut_tensors"):
        if getattr(a, name) != getattr(b, name):
            raise InvalidInput(name, f"the profiles of {a.model} and {b.model} differ in it")
    measured = {device.identity for device in a.devices if not device.estimated}
    return replace(a, block_weight_bytes=b.block_weight_bytes or a.block_weight_bytes).with_devices(
        device for device in b.devices if not (device.estimated and device.identity in measured)
    )


def profile_document(profile: ModelProfile) -> dict[str, Any]:
    """Returns the JSON form of a profile."""
    return {
        "format": PROFILE_FORMAT,
        "version": PROFILE_VERSION,
        "model": profile.model.name,
        "model_version": profile.model.version,
        "model_hash": profile.model_hash,
        "blocks": profile.blocks,
        "cut_row_bytes": list(profile.cut_row_bytes),
        "block_weight_bytes": list(profile.block_weight_bytes),
        "cut_tensors": [list(names) for names in profile.cut_tensors],
        "devices": [
            {
                "device_class": device.device_class,
                "virtual_level": device.virtual_level,
                "estimated": device.estimated,
                "source": device.source,
                "batch_sizes": list(device.batch_sizes),
                "p50_ns": [list(times) for times in device.p50_ns],
                "p95_ns": [list(times) for times in device.p95_ns],
            }
            for device in profile.devices
        ],
    }


def parse_profile(document: Mapping[str, Any], where: str = "profile") -> ModelProfile:
    """Returns the profile in its JSON form.

    Raises:
        InvalidInput: A key is missing, of the wrong type or inconsistent; the field names it.
    """
    form = field(document, "format", str, where)
    if form != PROFILE_FORMAT:
        raise InvalidInput(f"{where}.format", f"is {form!r}, not {PROFILE_FORMAT!r}")
    version = field(document, "version", int, where)
    if version != PROFILE_VERSION:
        raise InvalidInput(
            f"{where}.version", f"is {version}, this program reads {PROFILE_VERSION}"
        )
    blocks = field(document, "blocks", int, where)
    if blocks < 1:
        raise InvalidInput(f"{where}.blocks", f"is {blocks}, not at least 1")
    cuts = integers(field(document, "cut_row_bytes", list, where), 0, f"{where}.cut_row_bytes")
    if len(cuts) != blocks + 1 or cuts[0] or cuts[-1]:
        raise InvalidInput(
            f"{where}.cut_row_bytes", f"does not have {blocks + 1} entries, 0 at both ends"
        )
    weights = field(document, "block_weight_bytes", list, where)
    if len(weights) != blocks:
        raise InvalidInput(f"{where}.block_weight_bytes", f"does not have {blocks} entries")
    devices = tuple(
        _device_of(entry, blocks, f"{where}.devices[{i}]")
        for i, entry in enumerate(field(document, "devices", list, where))
    )
    if len({device.identity for device in devices}) < len(devices):
        raise InvalidInput(f"{where}.devices", "names a class and level twice")
    return ModelProfile(
        model=ModelKey(
            field(document, "model", str, where), field(document, "model_version", str, where)
        ),
        model_hash=field(document, "model_hash", str, where),
        blocks=blocks,
        cut_row_bytes=cuts,
        block_weight_bytes=integers(weights, 0, f"{where}.block_weight_bytes"),
        devices=devices,
        cut_tensors=_cut_tensors_of(document.get("cut_tensors", []), blocks, where),
    )


def _cut_tensors_of(entries: Any, blocks: int, where: str) -> tuple[tuple[str, ...], ...]:
    good = isinstance(entries, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in entries
    )
    if not good or len(entries) not in (0, blocks + 1):
        raise InvalidInput(f"{where}.cut_tensors", f"is not {blocks + 1} lists of tensor names")
    return tuple(tuple(names) for names in entries)


def _device_of(entry: Any, blocks: int, where: str) -> DeviceProfile:
    level = field(entry, "virtual_level", int, where)
    if level < 1:
        raise InvalidInput(f"{where}.virtual_level", f"is {level}, not at least 1")
    sizes = integers(field(entry, "batch_sizes", list, where), 1, f"{where}.batch_sizes")
    if sizes[:1] != (1,) or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise InvalidInput(f"{where}.batch_sizes", "does not ascend from 1")
    return DeviceProfile(
        device_class=field(entry, "device_class", str, where),
        virtual_level=level,
        estimated=field(entry, "estimated", bool, where),
        source=field(entry, "source", str, where),
        batch_sizes=sizes,
        p50_ns=_times_of(field(entry, "p50_ns", list, where), blocks, sizes, f"{where}.p50_ns"),
        p95_ns=_times_of(field(entry, "p95_ns", list, where), blocks, sizes, f"{where}.p95_ns"),
    )


def _times_of(rows: list[Any], blocks: int, sizes: Sequence[int], where: str) -> BlockTimes:
    if len(rows) != blocks:
        raise InvalidInput(where, f"does not have one row for each of {blocks} blocks")
    times = []
    for i, row in enumerate(rows):
        taken = integers(row, 0, f"{where}[{i}]")
        if len(taken) != len(sizes):
            raise InvalidInput(f"{where}[{i}]", f"does not have one time per batch size {sizes}")
        times.append(taken)
    return tuple(times)
