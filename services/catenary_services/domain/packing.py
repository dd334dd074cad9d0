"""What the sessions of a model are moved between chains for (Mell)."""

from __future__ import annotations

from typing import Literal, get_args

from catenary_services.errors import InvalidInput

PackingGoal = Literal["pack", "balance", "off"]
"""Onto as few chains as possible, so that GPUs become free; evenly over all; or not at all."""

PACKING_GOALS: tuple[PackingGoal, ...] = get_args(PackingGoal)


def packing_goal(value: object, field: str) -> PackingGoal:
    """Returns a goal that somebody wrote down.

    Args:
        value: What was written. YAML reads a bare `off` as false, so that is one too.
        field: Where, to name it in the error.

    Raises:
        InvalidInput: If it is none of `PACKING_GOALS`.
    """
    if value is False:
        return "off"
    for goal in PACKING_GOALS:
        if value == goal:
            return goal
    raise InvalidInput(field, f"{value!r} is none of {', '.join(PACKING_GOALS)}")
