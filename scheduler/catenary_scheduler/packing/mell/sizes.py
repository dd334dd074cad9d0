"""Classes of sizes (tiny, small, medium and large) with exact borders.

Source: Mell, section VI-C. Sizes and the capacity are integers, so that a size right on a border
C/2, C/3, C/4 or C/8 belongs to the lower class, whatever the capacity divides by.
"""

from __future__ import annotations

from typing import Final

TINY: Final = 1
"""Class of sizes in (C/8, C/4], and of groups of requests of at most C/8 each."""
SMALL: Final = 2
"""Class of sizes in (C/4, C/3]."""
MEDIUM: Final = 3
"""Class of sizes in (C/3, C/2]."""
LARGE: Final = 4
"""Class of sizes in (C/2, C]."""

KIND_LETTERS: Final = " TSML"


def kind_of(size: int, capacity: int) -> int:
    """Returns the class of a size.

    A size of at most C/8 counts as TINY too, because it joins a group.
    """
    if 2 * size > capacity:
        return LARGE
    if 3 * size > capacity:
        return MEDIUM
    if 4 * size > capacity:
        return SMALL
    return TINY


def is_minute(size: int, capacity: int) -> bool:
    """Returns True for a size of at most C/8. Requests of that size are packed in groups."""
    return 8 * size <= capacity


def is_well_filled(used: int, capacity: int) -> bool:
    """Returns True if at least three quarters of the capacity are used."""
    return 4 * used >= 3 * capacity


def blocks_of(tokens: int, tokens_per_block: int) -> int:
    """Returns how many blocks of cache hold `tokens` tokens."""
    return -(-tokens // tokens_per_block)
