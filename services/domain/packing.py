"""What the sessions of a model are moved between chains for (Mell)."""

from __future__ import annotations

from typing import Literal, get_args

PackingGoal = Literal["pack", "balance", "off"]
"""Onto as few chains as possible, so that GPUs become free; evenly over all; or not at all."""

PACKING_GOALS: tuple[PackingGoal, ...] = get_args(PackingGoal)
