"""The goal for which sessions of a model are moved between chains (Mell)."""

from __future__ import annotations

from typing import Literal, get_args

from catenary_services.errors import InvalidInput

PackingGoal = Literal["pack", "balance", "off"]
"""Sessions are packed onto as few chains as possible, so that GPUs become free, balanced evenly
over all chains, or not moved at all."""

PACKING_GOALS: tuple[PackingGoal, ...] = get_args(PackingGoal)


def packing_goal(value: object, field: str) -> PackingGoal:
    """Returns the packing goal that a file or a person wrote.

    Args:
        value: What was written. YAML reads a bare `off` as false, which therefore means "off".
        field: The field that the error names.

    Raises:
        InvalidInput: The value is none of `PACKING_GOALS`.
    """
    if value is False:
        return "off"
    for goal in PACKING_GOALS:
        if value == goal:
            return goal
    raise InvalidInput(field, f"{value!r} is none of {', '.join(PACKING_GOALS)}")
