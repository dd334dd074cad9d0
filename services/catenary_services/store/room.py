"""Room for fetched files: the limit of the folder, the space on its disk, and what makes way.

Versions that nothing has loaded make way, those first that were used least recently.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from catenary_services.content.record import FETCHED_FOLDER, machine
from catenary_services.errors import PlanInfeasible
from catenary_services.log import get_logger
from catenary_services.store import kept

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
_log = get_logger("catenary_services.store")


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """The folder of a fetched version."""

    folder: Path
    used_s: float
    """The moment of its last use, in seconds of the system's clock."""
    disk_bytes: int


class StoreLimit:
    """The room that fetched versions have below one folder. Thread-safe."""

    def __init__(self, root: Path, limit_bytes: int, free_bytes: int) -> None:
        """Looks after the versions below `root`.

        Args:
            root: The model folder.
            limit_bytes: The most that fetched versions take up; 0 for all there is.
            free_bytes: Space on the disk that is left to others.
        """
        self._root = root
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes

    def versions(self) -> list[KeptFolder]:
        """Returns the fetched versions, those first that were used least recently."""
        found = []
        for marks in self._root.glob(f"*/*/{FETCHED_FOLDER}"):
            folder = marks.parent
            if not folder.name.startswith("."):
                found.append(KeptFolder(folder, kept.last_use(folder), _disk_bytes(folder)))
        return sorted(found, key=lambda each: each.used_s)

    def make(self, nbytes: int) -> None:
        """Sees to it that there is room for more bytes; drops versions if it must.

        Raises:
            PlanInfeasible: There is none, though everything was dropped that nothing has loaded.
        """
        versions = self.versions()
        used = sum(each.disk_bytes for each in versions)
        limit = self._limit_bytes
        while (limit and used + nbytes > limit) or self._lacks(nbytes):
            dropped = self._drop_one(versions)
            if dropped is None:
                raise PlanInfeasible(self._problem(nbytes, used))
            used -= dropped.disk_bytes

    def full(self, error: OSError) -> PlanInfeasible:
        """Returns the error of a file that could not be written."""
        return PlanInfeasible(
            f"fetched files cannot be written to {self._root} on {machine()}: {error.strerror}"
        )

    def _drop_one(self, versions: list[KeptFolder]) -> KeptFolder | None:
        while versions:
            oldest = versions.pop(0)
            if kept.drop(oldest.folder):
                name = f"{oldest.folder.parent.name}:{oldest.folder.name}"
                _log.info("version_dropped", model=name, bytes=oldest.disk_bytes)
                return oldest
        return None

    def _lacks(self, nbytes: int) -> bool:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self._root).free < nbytes + self._free_bytes
        except OSError as error:
            raise self.full(error) from error

    def _problem(self, nbytes: int, used: int) -> str:
        where = f"{self._root} on {machine()}"
        if self._lacks(nbytes):
            free = shutil.disk_usage(self._root).free
            return (
                f"{nbytes} bytes of model files are to be fetched, and the disk of {where} has"
                f" {free} bytes free, of which {self._free_bytes} are left to others"
            )
        return (
            f"{nbytes} bytes of model files are to be fetched to {where}, and {used} of"
            f" {self._limit_bytes} are taken by versions in use: raise store_bytes"
        )


def _disk_bytes(folder: Path) -> int:
    """Returns the bytes that a folder takes up on the disk; holes in files take up none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * _BLOCK_BYTES
            except OSError:
                continue  # removed this moment
    return total
