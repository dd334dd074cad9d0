"""Choice of the kind of GPU for a new session, where there are several (completion G17).

Classes of sizes are relative to the capacity, so a session may be L on one kind of GPU and S on
another. There is one pool for each kind, and the choice among them is made once, at admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A kind of GPUs, or of chains, that have the same capacity.

    Attributes:
        name: Name of the class.
        capacity: Capacity of each GPU, in the unit of the sizes.
        cost: Cost of each GPU per time, in any currency.
    """

    name: str
    capacity: int
    cost: float


def device_class_for(size: int, classes: Sequence[DeviceClass]) -> DeviceClass | None:
    """Returns the device class for a new session; None if it fits none.

    Since sessions grow, the classes in which it takes at most half a GPU are preferred, and of
    these the cheapest per byte. If there is none, the largest class that fits is taken. Ties go to
    the larger capacity, then to the first name.

    Args:
        size: Size of the session at admission.
        classes: The classes to choose from.
    """
    roomy = [each for each in classes if 2 * size <= each.capacity]
    if roomy:
        return min(roomy, key=lambda each: (each.cost / each.capacity, -each.capacity, each.name))
    fitting = [each for each in classes if size <= each.capacity]
    return min(fitting, key=lambda each: (-each.capacity, each.name), default=None)
