"""Memory given back to the system after a burst: the C library keeps what was freed otherwise."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

_EVERY_S = 2.0


class _Trimmer:
    """Trims once for any number of bursts within a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False

    def wanted(self) -> None:
        """Has it done in a moment."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        threading.Thread(target=self._trim, name="memory-trim", daemon=True).start()

    def _trim(self) -> None:
        # What made the burst is freed by then, and the next one within this time with it.
        time.sleep(_EVERY_S)
        with self._lock:
            self._is_due = False
        try:
            trim = ctypes.CDLL(None).malloc_trim
        except AttributeError:  # another C library, which has another policy
            return
        gc.collect()
        trim(ctypes.c_size_t(0))


give_back_soon = _Trimmer().wanted
"""Has freed memory returned to the system in a moment; many calls cost as much as one."""
