"""Arithmetic and memory traffic of a model's blocks, counted kernel by kernel.

A *kernel* is a unit that a runtime launches: an operation with the element-wise operations fused
behind it. Values inside a kernel never reach the device's memory; its inputs and outputs do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from catenary_services.domain.model import KernelCost


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a graph; operations are in the order of execution."""

    reads: tuple[str, ...]
    """The data it reads, without weights."""
    writes: tuple[str, ...]
    flops: float = 0.0
    """Operations for one row; a multiply-add counts as two."""
    weight_elements: float = 0.0
    """Number of weights, which are read once, whatever the batch."""
    dense: bool = False
    """True for convolutions over many channels and matrix products, which tensor cores compute."""
    element_wise: bool = False
    """True if it can be fused behind the operation that made one of its inputs."""
    free: bool = False
    """True if it only renames or reshapes its first input."""


def kernels_of(
    operations: Sequence[Operation], elements: Mapping[str, float], outputs: Collection[str]
) -> tuple[KernelCost, ...]:
    """Returns the kernels that a fusing runtime launches for some operations.

    An element-wise operation joins the kernel that made one of its inputs, if that kernel is the
    last so far or nobody else reads the value.

    Args:
        operations: The operations of one block.
        elements: Number of elements of every value, for one row.
        outputs: The values that are needed after the block.
    """
    operations, outputs = _without_free(operations, outputs)
    readers = Counter(name for each in operations for name in each.reads)
    groups: list[list[Operation]] = []
    group_of: dict[str, int] = {}
    for operation in operations:
        joinable = [
            group_of[name]
            for name in operation.reads
            if name in group_of and (group_of[name] == len(groups) - 1 or readers[name] == 1)
        ]
        if operation.element_wise and joinable:
            group = max(joinable)
            groups[group].append(operation)
        else:
            group = len(groups)
            groups.append([operation])
        group_of.update(dict.fromkeys(operation.writes, group))
    return tuple(_kernel(group, readers, elements, set(outputs)) for group in groups)


def _kernel(
    group: Sequence[Operation],
    readers: Mapping[str, int],
    elements: Mapping[str, float],
    outputs: Collection[str],
) -> KernelCost:
    made = {name for operation in group for name in operation.writes}
    inside = Counter(name for operation in group for name in operation.reads)
    enter = set(inside) - made
    leave = {name for name in made if name in outputs or readers.get(name, 0) > inside[name]}
    return KernelCost(
        flops=sum(operation.flops for operation in group),
        elements=sum(elements.get(name, 0.0) for name in (*enter, *leave)),
        weight_elements=sum(operation.weight_elements for operation in group),
        dense=any(operation.dense for operation in group),
    )


def _without_free(
    operations: Sequence[Operation], outputs: Collection[str]
) -> tuple[list[Operation], set[str]]:
    """Drops operations that cost nothing; their readers read the original values instead."""
    alias: dict[str, str] = {}
    kept = []
    for operation in operations:
        reads = tuple(alias.get(name, name) for name in operation.reads)
        if operation.free and reads:
            alias.update(dict.fromkeys(operation.writes, reads[0]))
        elif not operation.free:
            kept.append(replace(operation, reads=reads))
    return kept, {alias.get(name, name) for name in outputs}
