"""The choice of cuts: blocks of about equal run time with few bytes over each cut.

The choice minimises, over all ways to place `blocks - 1` cuts,

    sum over blocks ((cost / target) - 1)^2  +  BYTE_WEIGHT * sum over cuts (bytes / typical bytes)

with target = total cost / blocks and typical bytes = the median over all possible positions. Both
sums are dimensionless. The optimum is found exactly by dynamic programming over (cuts used, last
position); `tests/gpu_agent/partitioning` compares it with an exhaustive search.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_agent.partitioning.graph import CutGraph

BYTE_WEIGHT = 0.1
"""The weight of bytes: a cut of typical size weighs as much as one block being 32 % off the
target."""

SMALLEST_BLOCK_NS = 150_000.0
"""Nanoseconds below which a block costs more in hand-over than it can gain in balance."""


@dataclass(frozen=True, slots=True)
class CutCandidates:
    """The possible cuts of one graph: their positions, bytes over each, and cost before each."""

    positions: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    cost_before: tuple[float, ...]
    total_cost: float

    @staticmethod
    def of(graph: CutGraph) -> CutCandidates:
        """Returns every position of `graph` where it may be cut."""
        positions = graph.cut_positions()
        sets = graph.crossing_sets()
        running = np.concatenate(([0.0], np.cumsum([node.cost_ns for node in graph.nodes])))
        return CutCandidates(
            positions=tuple(positions),
            crossing_bytes=tuple(
                sum(graph.value_bytes[value] for value in sets[position]) for position in positions
            ),
            cost_before=tuple(float(running[position]) for position in positions),
            total_cost=float(running[-1]),
        )

    def objective(self, chosen: Sequence[int]) -> float:
        """Returns the objective of ascending indices into `positions`; lower is better."""
        edges = [0.0, *(self.cost_before[i] for i in chosen), self.total_cost]
        target = self.total_cost / (len(chosen) + 1)
        imbalance = sum(
            ((right - left) / target - 1.0) ** 2 for left, right in itertools.pairwise(edges)
        )
        return imbalance + BYTE_WEIGHT * sum(
            self.crossing_bytes[i] / self.typical_bytes() for i in chosen
        )

    def typical_bytes(self) -> float:
        """Returns the median bytes over a cut (at least 1)."""
        return max(1.0, float(np.median(self.crossing_bytes))) if self.positions else 1.0


def choose_cuts(graph: CutGraph, blocks: int, smallest_ns: float | None = None) -> tuple[int, ...]:
    """Returns the positions of the best `blocks - 1` cuts, ascending; fewer if fewer are possible.

    Args:
        graph: The model; costs in nanoseconds, bytes per row.
        blocks: Wanted number of blocks. Small models get fewer.
        smallest_ns: The shortest mean time of a block; `SMALLEST_BLOCK_NS` if None.
    """
    candidates = CutCandidates.of(graph)
    smallest_ns = SMALLEST_BLOCK_NS if smallest_ns is None else smallest_ns
    affordable = max(1, int(candidates.total_cost // smallest_ns))
    count = min(blocks, affordable, len(candidates.positions) + 1)
    return tuple(candidates.positions[i] for i in best_choice(candidates, count))


def best_choice(candidates: CutCandidates, blocks: int) -> tuple[int, ...]:
    """Returns the indices of the `blocks - 1` cuts with the least objective."""
    cuts = blocks - 1
    if cuts <= 0 or candidates.total_cost <= 0:
        return ()
    before = np.array(candidates.cost_before)
    target = candidates.total_cost / blocks
    price = BYTE_WEIGHT * np.array(candidates.crossing_bytes) / candidates.typical_bytes()
    best = (before / target - 1.0) ** 2 + price
    # step[i, j] is the cost of the block between cuts i and j; only i < j is a block.
    step = ((before[None, :] - before[:, None]) / target - 1.0) ** 2
    step[np.tril_indices(len(before))] = np.inf
    origins = []
    for _ in range(cuts - 1):
        through = best[:, None] + step
        origin = np.argmin(through, axis=0)
        best = through[origin, np.arange(len(before))] + price
        origins.append(origin)
    best = best + ((candidates.total_cost - before) / target - 1.0) ** 2
    chosen = [int(np.argmin(best))]
    for origin in reversed(origins):
        chosen.append(int(origin[chosen[-1]]))
    return tuple(reversed(chosen))
