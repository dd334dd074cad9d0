"""How Mell chooses among GPUs that would all do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Weights of the priority of a GPU for a request (Mell, section VI-C).

    Arrivals go by workload alone; moves by all three.
    """

    workload_weight: float = 1.0
    """For each request the GPU has already, its priority falls by so much."""
    memory_weight: float = 1.0
    """For an idle GPU's memory, its priority rises by so much."""
    distance_weight: float = 1.0
    """Its priority falls by so much for each unit of distance from where the request is."""
    distance: Callable[[int, int], float] | None = None
    """Of two bins by their numbers, e.g. 0 within a machine and 1 across; None: all are as near."""


def priority(
    config: PackingConfig, requests: int, idle_share: float, source: int, target: int
) -> float:
    """Returns how much a GPU is preferred for a request; more is better.

    Args:
        config: The weights.
        requests: That the GPU has.
        idle_share: Of its memory, 0 to 1.
        source: Bin that the request comes from; -1 for an arrival.
        target: The GPU's bin.
    """
    score = -config.workload_weight * requests
    if source < 0:
        return score
    score += config.memory_weight * idle_share
    if config.distance is not None:
        score -= config.distance_weight * config.distance(source, target)
    return score
