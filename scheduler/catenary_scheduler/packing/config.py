"""Preferences among GPUs that would all do, as in Mell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Weights of the priority of a GPU for a request (Mell, section VI-C).

    Arrivals use the workload alone, moves use all three weights.
    """

    workload_weight: float = 1.0
    """Decrease of a GPU's priority for each request that it has already."""
    memory_weight: float = 1.0
    """Increase of a GPU's priority for idle memory, for a GPU that is completely idle."""
    distance_weight: float = 1.0
    """Decrease of a GPU's priority for each unit of distance from where the request is."""
    distance: Callable[[int, int], float] | None = None
    """Distance between two bins by their numbers, e.g. 0 within a machine and 1 across. None stands
    for equal distances."""


def priority(
    config: PackingConfig, requests: int, idle_share: float, source: int, target: int
) -> float:
    """Returns the priority of a GPU for a request; the higher, the better.

    Args:
        config: The weights.
        requests: Number of requests on the GPU.
        idle_share: Idle share of its memory, 0 to 1.
        source: Number of the bin that the request comes from; -1 for an arrival.
        target: Number of the GPU's bin.
    """
    score = -config.workload_weight * requests
    if source < 0:
        return score
    score += config.memory_weight * idle_share
    if config.distance is not None:
        score -= config.distance_weight * config.distance(source, target)
    return score
