"""Settings of the model store, the same for agents and gateways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catenary_services.settings import ModelFolderSettings

PIECE_BYTES = 256 << 10
"""The most bytes of one answer: a request of a user that comes behind it waits 42 ms at 50
Mbit/s."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of a `ModelStore`."""

    limit_bytes: int = 0
    """The most that fetched versions may take up on disk; 0 for all there is."""
    fetch_bytes_per_second: int = 0
    """The most that is fetched from all peers together; 0 without a limit."""
    serve_bytes_per_second: int = 0
    """The most that is sent to all peers together; 0 without a limit."""
    stall_s: float = 60.0
    """A load fails if none of the bytes that it waits for arrives for so long."""
    answer_s: float = 20.0
    """A peer that does not answer for so long is asked again later."""
    free_bytes: int = 64 << 20
    """Disk space that is left to others."""


def store_settings(process: ModelFolderSettings) -> StoreSettings:
    """Returns the settings of a process's store."""
    return StoreSettings(
        limit_bytes=process.store_bytes,
        fetch_bytes_per_second=process.fetch_bytes_per_second,
        serve_bytes_per_second=process.serve_bytes_per_second,
    )
