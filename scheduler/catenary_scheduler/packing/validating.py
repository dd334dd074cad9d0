"""Input checks of packers, made before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from catenary_scheduler.packing.moves import Item
from catenary_services.errors import InvalidInput


def check_size(field: str, size: int, capacity: int) -> None:
    """Raises InvalidInput if a session is empty or fits no bin (completion G13)."""
    if not 0 < size <= capacity:
        raise InvalidInput(field, f"a session of {size} does not fit a GPU of {capacity}")


def check_epoch(
    departed: Sequence[Item],
    sizes: Mapping[Item, int],
    arrived: Mapping[Item, int],
    knows: Callable[[Item], bool],
    capacity: int,
) -> None:
    """Checks the input of an epoch.

    Args:
        departed: Sessions that are over.
        sizes: Sizes that other sessions will have.
        arrived: Sizes of new sessions.
        knows: Returns True for a session that is placed or waits.
        capacity: Capacity of a bin.

    Raises:
        InvalidInput: A session does not fit a bin, is not known, is known already, or departs
            twice.
    """
    for item in departed:
        if not knows(item):
            raise InvalidInput("departed", f"session {item} is not known")
    if len(set(departed)) < len(departed):
        raise InvalidInput("departed", "a session departs twice")
    for item, size in sizes.items():
        check_size("sizes", size, capacity)
        if not knows(item):
            raise InvalidInput("sizes", f"session {item} is not known")
    for item, size in arrived.items():
        check_size("arrived", size, capacity)
        if knows(item):
            raise InvalidInput("arrived", f"session {item} is known already")
