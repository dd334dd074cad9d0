"""The C library's memory: what it keeps for the next messages, and what it gives back."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from contextlib import suppress

_EVERY_S = 2.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20
"""Also the largest threshold for mappings that the GNU C library takes."""


def keep_freed_memory() -> None:
    """Has the C library keep up to 32 MiB of freed memory for the next buffers.

    It would give a buffer of a tensor back to the system at once, and with the next one every page
    is faulted in and cleared anew, which takes as long as three copies of it.
    """
    with suppress(AttributeError):  # another C library, which has a policy of its own
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, _KEPT_BYTES)


class _Trimmer:
    """Trims the memory of the C library once for all bursts within two seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False

    def wanted(self) -> None:
        """Schedules a trim, unless one is scheduled already."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        threading.Thread(target=self._trim, name="memory-trim", daemon=True).start()

    def _trim(self) -> None:
        # By then the memory of this burst is free, and that of bursts that follow within the time.
        time.sleep(_EVERY_S)
        with self._lock:
            self._is_due = False
        try:
            trim = ctypes.CDLL(None).malloc_trim
        except AttributeError:  # another C library, which has a policy of its own
            return
        gc.collect()
        trim(ctypes.c_size_t(0))


give_back_soon = _Trimmer().wanted
"""Schedules the return of freed memory to the system; many calls cost as much as one."""
