"""Timelines, pools and the probe: compiled if the extension was built, else in plain Python.

Both have the same classes and give the same results. `CATENARY_PURE=1` selects plain Python.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("CATENARY_PURE") == "1":
    COMPILED = False
else:
    try:
        from catenary_scheduler.book import _native

        COMPILED = True
    except ImportError:
        COMPILED = False

if TYPE_CHECKING or not COMPILED:
    from catenary_scheduler.book.pool import Pool, PoolMember
    from catenary_scheduler.book.probe import Path, PathHop, PoolChain, uses_of
    from catenary_scheduler.book.timeline import BookedInterval, Timeline, earliest_slot, enter
else:
    PoolMember, Pool = _native.PoolMember, _native.Pool
    Path, PoolChain, PathHop = _native.Path, _native.PoolChain, _native.PathHop
    Timeline, BookedInterval = _native.Timeline, _native.BookedInterval
    earliest_slot, enter, uses_of = _native.earliest_slot, _native.enter, _native.uses_of

__all__ = [
    "COMPILED",
    "BookedInterval",
    "Path",
    "PathHop",
    "Pool",
    "PoolChain",
    "PoolMember",
    "Timeline",
    "earliest_slot",
    "enter",
    "uses_of",
]
