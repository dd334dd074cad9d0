"""The run of a workload under a packing policy, from an empty cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from catenary_scheduler.packing.policies import PackingPolicy
from catenary_services.errors import InvalidInput
from catenary_simulator.packing.loop import BLOCK_TOKENS, PackingLoop, PackingTiming
from catenary_simulator.packing.result import FigureScale, PackingResult, result_of
from catenary_simulator.packing.transfers import EpochTransfers, TransferNetwork
from catenary_simulator.packing.workload import fitting
from catenary_simulator.placement.workload import RequestWorkload


@dataclass(frozen=True, slots=True)
class GpuKind:
    """The kind of all GPUs of a run.

    Attributes:
        cache_tokens: Capacity C of the cache in tokens.
        token_bytes: Bytes of the cache of one token.
        token_ms: Duration of a decode step, for any batch.
    """

    cache_tokens: int
    token_bytes: int
    token_ms: float = 25.0


class PolicyFactory(Protocol):
    """A factory of the policy of a run."""

    @property
    def reserve(self) -> bool:
        """Whether sessions count with their final length from the start."""
        ...

    def make(self, capacity: int, most_gpus: int | None) -> PackingPolicy:
        """Returns a policy without sessions; `most_gpus` None: there is no limit."""
        ...


@dataclass(frozen=True, slots=True)
class PackingRun:
    """The settings of one run.

    Attributes:
        gpu: Kind of the GPUs.
        policy: Factory of the packing policy.
        warm_up_s: Seconds at the start that are not measured.
        duration_s: Seconds that are measured, after the warm-up.
        epoch_s: Seconds between decisions.
        most_gpus: Number of GPUs; None: as many as the policy wants.
        patience_s: Seconds after which a waiting session gives up; None: never.
        cut: Whether sessions larger than a GPU are cut instead of refused.
        network: Boundaries to divide moves by; None: moves are only counted.
        stopwatch: Clock in nanoseconds to time every epoch's decision; None: they are not timed.
    """

    gpu: GpuKind
    policy: PolicyFactory
    warm_up_s: float
    duration_s: float
    epoch_s: float = 1.0
    most_gpus: int | None = None
    patience_s: float | None = None
    cut: bool = False
    network: TransferNetwork | None = None
    stopwatch: Callable[[], int] | None = None


def serve_packing(run: PackingRun, sessions: RequestWorkload) -> PackingResult:
    """Runs sessions under a policy, and returns the figures.

    Raises:
        InvalidInput: An epoch is shorter than a decode step.
    """
    gpu = run.gpu
    capacity = gpu.cache_tokens // BLOCK_TOKENS
    step_tokens = round(run.epoch_s * 1000 / gpu.token_ms)
    if step_tokens < 1:
        raise InvalidInput("epoch_s", "is shorter than a decode step")
    kept, unfit = fitting(sessions, capacity * BLOCK_TOKENS, cut=run.cut)
    warm_up = round(run.warm_up_s / run.epoch_s)
    pace = PackingTiming(
        warm_up + max(1, round(run.duration_s / run.epoch_s)),
        warm_up,
        run.epoch_s,
        step_tokens,
        None if run.patience_s is None else round(run.patience_s / run.epoch_s),
        run.policy.reserve,
    )
    transfers = None if run.network is None else EpochTransfers(run.network, gpu.token_bytes)
    policy = run.policy.make(capacity, run.most_gpus)
    loop = PackingLoop(policy, capacity, kept, pace, transfers, run.stopwatch)
    loop.run()
    scale = FigureScale(capacity, run.epoch_s, warm_up, gpu.token_bytes, unfit)
    return result_of(loop.counts, scale, None if transfers is None else transfers.tally)
