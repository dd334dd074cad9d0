"""Policies of packing by their names in scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from catenary_lab.packing.baselines import BestFit, WorstFit
from catenary_lab.packing.load_balancing import LoadBalancing
from catenary_scheduler.packing.lazy.lazy_pool import LazyPool
from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import EpochResult, Item, PackingMove
from catenary_scheduler.packing.policies import PackingPolicy

PolicyName = Literal["best-fit", "worst-fit", "load-balancing", "mell", "mell-batched", "pack"]
"""Names of policies. mell: the paper's rules, one operation after the other; mell-batched: an
epoch's operations together; pack: the same bound with few moves, as deployments run it."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by its name, with its options.

    Attributes:
        name: Name of the policy.
        reserve: Whether sessions count with their final length from the start (BF and WF of systems
            that reserve), which no policy can know in service.
    """

    name: PolicyName
    reserve: bool = False

    def make(self, capacity: int, most_gpus: int | None) -> PackingPolicy:
        """Returns the policy without sessions.

        Args:
            capacity: Capacity of a GPU, in blocks.
            most_gpus: Number of GPUs; None: any number.
        """
        return _POLICIES[self.name](capacity, most_bins=most_gpus)


class OneByOne(MellPool):
    """Mell without operation batching: an epoch is a sequence of single operations.

    Every move of every operation counts, also both of a session that moves twice. Only sessions
    that came or ended in this very epoch have nothing to move.
    """

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        """Takes the events of an epoch as single operations: departures, growth, arrivals."""
        moves: list[PackingMove] = []
        gone = list(departed)
        placed: set[Item] = set()
        preempted: dict[Item, None] = {}

        def take(found: EpochResult) -> None:
            placed.update(found.placed)
            moves.extend(move for move in found.moves if move.item not in placed)
            preempted.update(dict.fromkeys(found.preempted))

        for item in gone:
            take(super().epoch((item,), {}, {}))
        for item, size in sizes.items():
            take(super().epoch((), {item: size}, {}))
        for item, size in arrived.items():
            take(super().epoch((), {}, {item: size}))
        bins = {item: self.bin_of(item) for item in placed}
        ended = set(gone)
        moves = [move for move in moves if move.item not in ended]
        there = {item: gpu for item, gpu in bins.items() if gpu is not None}
        return EpochResult(tuple(moves), there, self.queued(), tuple(preempted))


_POLICIES: dict[PolicyName, Callable[..., PackingPolicy]] = {
    "best-fit": BestFit,
    "worst-fit": WorstFit,
    "load-balancing": LoadBalancing,
    "mell": OneByOne,
    "mell-batched": MellPool,
    "pack": LazyPool,
}
