"""What became of GPUs and sessions under a policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from catenary_simulator.packing.transfers import TransferTally


@dataclass(slots=True)
class PackingCounts:
    """What is added up over the measured epochs; sizes in the unit of the capacity.

    Attributes:
        gpus: Active ones, epoch by epoch (those before the measured ones as well).
        used: Held by sessions, over all epochs.
        lower_bounds: L2, over all epochs.
        migrations: Running sessions that changed their GPU.
        migrated_tokens: That these held.
        preemptions: Sessions that lost their cache.
        recomputed_tokens: That these held.
        queued: Waiting sessions, over all epochs.
        queued_peak: At a time, at most.
        present: Placed and waiting sessions, over all epochs.
        arrived: Sessions.
        ended: With their last token.
        undisturbed: Of those, never preempted and never waited.
        gave_up: Waited for too long.
        violations: Of invariants; 0 unless something is wrong.
        decision_ns: Of every epoch, if they were timed.
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
        gpus_mean: Active GPUs, on average over time.
        gpus_peak: The same, at most.
        utilisation: Share of the active GPUs' capacity that sessions held.
        migrations_per_s: Running sessions that changed their GPU.
        migrated_bytes_per_s: Of their caches.
        preemptions_per_s: Sessions that lost their cache for want of room.
        lower_bound_gpus: No packing of the sessions of a moment needs fewer (L2), on average.
        recomputed_tokens_per_s: Read again for preempted sessions.
        sessions_mean: Present at a time, waiting ones included.
        queued_mean: Waiting at a time.
        queued_peak: The same, at most.
        arrived: Sessions.
        ended: With their last token.
        undisturbed: Share of those that ended or gave up whose cache was held from their arrival to
            their end.
        held: Share of the sessions present at a time whose cache was held.
        gave_up: Sessions that waited for too long.
        unfit: Sessions larger than a GPU, refused or cut.
        violations: Of invariants; 0 unless something is wrong.
        transfers: Moves by the way they went; None without boundaries.
        decision_p50_us: Of an epoch, if they were timed.
        decision_p99_us: Of an epoch, if they were timed.
        gpus: Active ones, epoch by epoch, from the first arrival.
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
        """Returns the figures without the series; None where there is nothing to speak of."""
        facts = asdict(self)
        del facts["gpus"]
        transfers = facts.pop("transfers")
        if transfers is not None:
            facts["transfers"] = transfers
        return facts


@dataclass(frozen=True, slots=True)
class FigureScale:
    """What turns counts into figures.

    Attributes:
        capacity: Of a GPU, in the unit of sizes.
        epoch_s: Length of an epoch.
        warm_up_epochs: Not measured.
        token_bytes: Cache of one token.
        unfit: Sessions larger than a GPU.
    """

    capacity: int
    epoch_s: float
    warm_up_epochs: int
    token_bytes: int
    unfit: int = 0


def result_of(
    counts: PackingCounts, scale: FigureScale, transfers: TransferTally | None
) -> PackingResult:
    """Returns the figures of a run."""
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
