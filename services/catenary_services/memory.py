"""Return of freed memory to the system after a burst, which the C library would otherwise keep."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

_EVERY_S = 2.0


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
