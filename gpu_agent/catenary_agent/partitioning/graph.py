"""A model as a directed acyclic graph, reduced to what matters for cutting it.

Nodes are in a topological order; cutting at position `p` means that nodes `[0, p)` run before nodes
`[p, n)`. The *crossing set* of `p` is everything computed (or given) before `p` that is needed
after it, including graph outputs produced early. It thus has all that a later part can ask for, and
any range of nodes between two cuts is self-contained.

Values that do not depend on the model's inputs (weights, constant arithmetic) are not in the graph:
front ends leave them out and duplicate them into every part that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation of the model."""

    reads: tuple[str, ...]
    """The values it reads, including those captured by a nested body (If, Loop)."""
    writes: tuple[str, ...]
    """The values it produces."""
    cost_ns: float = 1.0
    """The estimated run time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class CutGraph:
    """The data flow of a model."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    """The operations in a topological order."""
    value_bytes: Mapping[str, int]
    """Size of each value for one row."""
    bonds: frozenset[tuple[int, int]] = frozenset()
    """Pairs of nodes never to be separated: (producer, consumer), such as Conv and its Relu."""
    immovable: frozenset[str] = frozenset()
    """Values that cannot be sent: without a batch dimension in a batched model, or no tensors."""

    def crossing_sets(self) -> list[tuple[str, ...]]:
        """Returns the crossing set of every position 0..n, in order of production.

        The set at 0 is the graph's inputs and the one at n its outputs, each in its declared order.
        An input that nobody reads is in the set at 0 only.
        """
        count = len(self.nodes)
        last_use: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            for value in node.reads:
                last_use[value] = index
        for value in self.outputs:
            last_use[value] = count
        alive = {value: None for value in self.inputs if value in last_use}
        sets: list[tuple[str, ...]] = [self.inputs]
        for index, node in enumerate(self.nodes):
            alive.update((value, None) for value in node.writes if value in last_use)
            # A value last read by this very node is not needed after it.
            for value in dict.fromkeys((*node.reads, *node.writes)):
                if last_use.get(value) == index:
                    alive.pop(value, None)
            sets.append(tuple(alive))
        sets[count] = self.outputs
        return sets

    def cut_positions(self) -> list[int]:
        """Returns the inner positions where cutting is possible and sensible, ascending."""
        forbidden = [False] * (len(self.nodes) + 1)
        for producer, consumer in self.bonds:
            for position in range(producer + 1, consumer + 1):
                forbidden[position] = True
        sets = self.crossing_sets()
        return [
            position
            for position in range(1, len(self.nodes))
            if not forbidden[position]
            and sets[position]
            and self.immovable.isdisjoint(sets[position])
        ]
