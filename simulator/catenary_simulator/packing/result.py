"""Counts and figures of GPUs and sessions under a packing policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from catenary_simulator.packing.transfers import TransferTally


@dataclass(slots=True)
class PackingCounts:
    """Counts over the measured epochs; sizes are in the unit of the capacity.

    Attributes:
        gpus: Number of active GPUs by epoch, epochs before the measured ones included.
        used: Capacity held by sessions, summed over epochs.
        lower_bounds: The bound L2 on the number of GPUs, summed over epochs.
        migrations: Number of moves of running sessions to another GPU.
        migrated_tokens: Tokens in the caches of moved sessions.
        preemptions: Number of times that a session lost its cache.
        recomputed_tokens: Tokens in the caches that were lost.
        queued: Number of waiting sessions, summed over epochs.
        queued_peak: Most waiting sessions in an epoch.
        present: Number of placed and waiting sessions, summed over epochs.
        arrived: Number of sessions that arrived.
        ended: Number of sessions that got their last token.
        undisturbed: Number of ended sessions that never waited and were never preempted.
        gave_up: Number of sessions that waited for too long.
        violations: Number of violated invariants; 0 unless something is wrong.
        decision_ns: Time of every measured decision; empty if they were not timed.
    """

    gpus: list[int] = field(default_factory=list)
    used: int = 0
    lower_bounds: int = 0
    migrations: int = 0
    migrated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    queued: int = 0
    queued_peak: int = 0
    present: int = 0
    arrived: int = 0
    ended: int = 0
    undisturbed: int = 0
    gave_up: int = 0
    violations: int = 0
    decision_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PackingResult:
    """Figures of one run, over the epochs after the warm-up.

    Attributes:
        gpus_mean: Mean number of active GPUs.
        gpus_peak: Most active GPUs in an epoch.
        utilisation: Share of the active GPUs' capacity that sessions held.
        migrations_per_s: Moves of running sessions to another GPU per second.
        migrated_bytes_per_s: Bytes of the moved caches per second.
        preemptions_per_s: Losses of a session's cache for lack of room per second.
        lower_bound_gpus: Mean of the bound L2: no packing of the same sessions needs fewer GPUs.
        recomputed_tokens_per_s: Tokens that preempted sessions lost, per second.
        sessions_mean: Mean number of present sessions, waiting ones included.
        queued_mean: Mean number of waiting sessions.
        queued_peak: Most waiting sessions in an epoch.
        arrived: Number of sessions that arrived.
        ended: Number of sessions that got their last token.
        undisturbed: Share of those that ended or gave up whose cache was held from their arrival to
            their end; None if there are none.
        held: Mean share of the present sessions whose cache was held; None if there are none.
        gave_up: Number of sessions that waited for too long.
        unfit: Number of sessions larger than a GPU, refused or cut.
        violations: Number of violated invariants; 0 unless something is wrong.
        transfers: Moves by the way they went; None without boundaries.
        decision_p50_us: Median time of an epoch's decision; None if it was not timed.
        decision_p99_us: 99th percentile of that time; None if it was not timed.
        gpus: Number of active GPUs by epoch, from the first arrival on.
    """

    gpus_mean: float
    gpus_peak: int
    utilisation: float
    migrations_per_s: float
    migrated_bytes_per_s: float
    preemptions_per_s: float
    lower_bound_gpus: float
    recomputed_tokens_per_s: float
    sessions_mean: float
    queued_mean: float
    queued_peak: int
    arrived: int
    ended: int
    undisturbed: float | None
    held: float | None
    gave_up: int
    unfit: int
    violations: int
    transfers: TransferTally | None
    decision_p50_us: float | None
    decision_p99_us: float | None
    gpus: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures by name, without the series; `transfers` only if there are any."""
        facts = asdict(self)
        del facts["gpus"]
        transfers = facts.pop("transfers")
        if transfers is not None:
            facts["transfers"] = transfers
        return facts


@dataclass(frozen=True, slots=True)
class FigureScale:
    """The scale that turns counts into figures.

    Attributes:
        capacity: Capacity of a GPU, in the unit of sizes.
        epoch_s: Length of an epoch in seconds.
        warm_up_epochs: Number of epochs that are not measured.
        token_bytes: Bytes of the cache of one token.
        unfit: Number of sessions larger than a GPU.
    """

    capacity: int
    epoch_s: float
    warm_up_epochs: int
    token_bytes: int
    unfit: int = 0


def result_of(
    counts: PackingCounts, scale: FigureScale, transfers: TransferTally | None
) -> PackingResult:
    measured = counts.gpus[scale.warm_up_epochs :]
    epochs, seconds = len(measured), len(measured) * scale.epoch_s
    gpu_epochs = sum(measured)
    over = counts.ended + counts.gave_up
    times = sorted(counts.decision_ns)
    return PackingResult(
        gpus_mean=gpu_epochs / epochs,
        gpus_peak=max(measured),
        utilisation=counts.used / (gpu_epochs * scale.capacity) if gpu_epochs else 0.0,
        migrations_per_s=counts.migrations / seconds,
        migrated_bytes_per_s=counts.migrated_tokens * scale.token_bytes / seconds,
        preemptions_per_s=counts.preemptions / seconds,
        lower_bound_gpus=counts.lower_bounds / epochs,
        recomputed_tokens_per_s=counts.recomputed_tokens / seconds,
        sessions_mean=counts.present / epochs,
        queued_mean=counts.queued / epochs,
        queued_peak=counts.queued_peak,
        arrived=counts.arrived,
        ended=counts.ended,
        undisturbed=counts.undisturbed / over if over else None,
        held=1 - counts.queued / counts.present if counts.present else None,
        gave_up=counts.gave_up,
        unfit=scale.unfit,
        violations=counts.violations,
        transfers=transfers,
        decision_p50_us=_quantile_us(times, 0.5),
        decision_p99_us=_quantile_us(times, 0.99),
        gpus=tuple(counts.gpus),
    )


def _quantile_us(times_ns: list[int], share: float) -> float | None:
    return times_ns[int(share * (len(times_ns) - 1))] / 1000 if times_ns else None
