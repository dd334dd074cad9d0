"""Which kind of GPU takes a new session, where there are several (completion G17).

Classes of sizes are relative to the capacity, so that a session may be L on one kind of GPU and S
on another. There is one pool for each kind; this chooses among them, once, at admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """GPUs, or chains, of one capacity.

    Attributes:
        name: Of the class.
        capacity: Of each, in the unit of sizes.
        cost: Of each, per time, in any currency.
    """

    name: str
    capacity: int
    cost: float


def device_class_for(size: int, classes: Sequence[DeviceClass]) -> DeviceClass | None:
    """Returns the class for a new session; None if it fits none.

    The cheapest per byte of those where it takes half a GPU at most, since sessions grow; if there
    is none, the largest. Equal choices go to the larger capacity, then to the name.

    Args:
        size: At admission.
        classes: To choose from.
    """
    roomy = [each for each in classes if 2 * size <= each.capacity]
    if roomy:
        return min(roomy, key=lambda each: (each.cost / each.capacity, -each.capacity, each.name))
    fitting = [each for each in classes if size <= each.capacity]
    return min(fitting, key=lambda each: (-each.capacity, each.name), default=None)
