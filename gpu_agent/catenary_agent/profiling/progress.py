"""Measured results on disk, written after every step, so that a measurement can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from catenary_agent.profiling.samples import MeasurementSummary
from catenary_services.domain.model import BlockTable
from catenary_services.domain.profile import DeviceProfile, ModelProfile, tensors_at_cuts
from catenary_services.models.model_repository import write_file

PARTIAL_FORMAT = "catenary-profile-partial"


class MeasurementStep(NamedTuple):
    """One measurement: a level (virtual GPUs per device), a block and a batch size."""

    level: int
    block: int
    rows: int


class ProfileProgress:
    """The measured steps of one model file, cut one way, by kind of measurement.

    Steps measured with other settings stay in the file, but do not count for this measurement.
    """

    def __init__(self, path: Path, table: BlockTable) -> None:
        """Reads what `path` has of the same model file and cuts, if anything."""
        self._path = path
        self._identity = {
            "format": PARTIAL_FORMAT,
            "version": 1,
            "model_hash": table.model_hash,
            "cut_tensors": [list(names) for names in tensors_at_cuts(table)],
        }
        self._measured: dict[str, dict[str, list[int]]] = self._read()

    def _read(self) -> dict[str, dict[str, list[int]]]:
        try:
            document = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}  # absent or unreadable, so everything is measured again
        same = isinstance(document, dict) and all(
            document.get(key) == value for key, value in self._identity.items()
        )
        measured = document.get("measured") if same else None
        return measured if isinstance(measured, dict) else {}

    def take_up(self, profile: ModelProfile | None) -> None:
        """Counts the measured times of a finished profile as measured already."""
        for device in profile.devices if profile is not None else ():
            if device.estimated:
                continue
            entries = self._entries(device.device_class, device.source)
            for block, (p50, p95) in enumerate(zip(device.p50_ns, device.p95_ns, strict=True)):
                for rows, a, b in zip(device.batch_sizes, p50, p95, strict=True):
                    step = MeasurementStep(device.virtual_level, block, rows)
                    entries.setdefault(_text(step), [a, b])

    def is_done(self, device_class: str, source: str, step: MeasurementStep) -> bool:
        """Returns True if this step was measured before in the same way."""
        return _text(step) in self._entries(device_class, source)

    def add(
        self, device_class: str, source: str, step: MeasurementStep, summary: MeasurementSummary
    ) -> None:
        """Adds a measurement and replaces the file atomically."""
        self._entries(device_class, source)[_text(step)] = [summary.p50_ns, summary.p95_ns]
        write_file(self._path, json.dumps({**self._identity, "measured": self._measured}))

    def device_profile(
        self, device_class: str, source: str, level: int, blocks: int, batch_sizes: Sequence[int]
    ) -> DeviceProfile:
        """Returns the times of a level all of whose steps are done."""
        entries = self._entries(device_class, source)
        found = [
            [entries[_text(MeasurementStep(level, block, rows))] for rows in batch_sizes]
            for block in range(blocks)
        ]
        return DeviceProfile(
            device_class=device_class,
            virtual_level=level,
            estimated=False,
            source=source,
            batch_sizes=tuple(batch_sizes),
            p50_ns=tuple(tuple(entry[0] for entry in row) for row in found),
            p95_ns=tuple(tuple(entry[1] for entry in row) for row in found),
        )

    def finish(self) -> None:
        """Removes the file, because the profile has everything now."""
        self._path.unlink(missing_ok=True)

    def _entries(self, device_class: str, source: str) -> dict[str, list[int]]:
        return self._measured.setdefault(f"{device_class}: {source}", {})


def _text(step: MeasurementStep) -> str:
    return "/".join(map(str, step))
