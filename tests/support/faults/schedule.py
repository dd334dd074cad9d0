"""Draws from a seed which faults come, singly and in pairs, and what they are like (pure)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from faults.base import REGISTRY, Fault

PAIRS = 1 / 3
"""Share of the steps in which a second fault begins while the first is in force."""
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Step:
    """A fault after a while of calm; perhaps a second one `offset_s` after the first.

    Attributes:
        number: From 1.
        calm_s: Undisturbed time before it.
        fault: The first.
        hold_s: How long it lasts.
        second: The other one, or None; it lasts as long as the first from its own beginning.
        offset_s: From the beginning of the first to that of the second.
    """

    number: int
    calm_s: float
    fault: Fault
    hold_s: float
    second: Fault | None = None
    offset_s: float = 0.0

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (self.fault,) if self.second is None else (self.fault, self.second)

    def __str__(self) -> str:
        text = f"{self.number}. after {self.calm_s:.1f} s {self.fault} for {self.hold_s:.1f} s"
        if self.second is not None:
            text += f", {self.offset_s:.1f} s later {self.second}"
        return text


def schedule(seed: int, names: Sequence[str] = (), pairs: float = PAIRS) -> Iterator[Step]:
    """Yields steps without an end, the same ones for a seed and a set of names.

    Every fault comes once before any comes again, as the first of its step; seconds are drawn
    freely among those that befall others.

    Args:
        seed: Determines everything.
        names: Of the faults to draw from; empty: all there are.
        pairs: Share of the steps with two.
    """
    draw = random.Random(seed)
    known = sorted(names or REGISTRY)
    number = 0
    while True:
        order = known.copy()
        draw.shuffle(order)
        for name in order:
            number += 1
            yield _step(number, REGISTRY[name], known, draw, pairs)


def _step(
    number: int, kind: type[Fault], names: Sequence[str], draw: random.Random, pairs: float
) -> Step:
    first = kind(random.Random(draw.random()))
    calm_s, hold_s = draw.uniform(0.5, 2.0), draw.uniform(*kind.hold_s)
    second: Fault | None = None
    if draw.random() < pairs:
        second = _another(first, names, draw)
    offset_s = draw.uniform(0.3, max(0.4, hold_s - 0.5)) if second else 0.0
    return Step(number, calm_s, first, hold_s, second, offset_s)


def _another(first: Fault, names: Sequence[str], draw: random.Random) -> Fault | None:
    for _ in range(_TRIES):
        found = REGISTRY[draw.choice(names)](random.Random(draw.random()))
        if not set(found.victims) & set(first.victims) and found.name != first.name:
            return found
    return None
