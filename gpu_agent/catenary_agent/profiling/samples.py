"""The p50 and p95 of timed runs, counting only those during which every sibling was busy.

All virtual GPUs of a device run the same block at the same time, each as fast as it can. Those that
begin early or end late have the device to themselves for a moment; such runs do not count. The
timestamps are of one monotonic clock, which the processes of a host share.

A run that is shorter than the operating system's (or the driver's) time slice mostly has no
concurrent sibling, and now and then waits for a whole slice. The median of such runs would promise
a throughput that nobody gets. So p50 is the median over groups of successive runs that last
`SHARED_SPAN_NS` together, of the time per run, pauses included; p95 is that of single runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHARED_SPAN_NS = 20_000_000
"""Several time slices of a shared device. The runs of a single virtual GPU are not grouped."""

Runs = Sequence[tuple[int, int]]
"""Start and end of each run of one virtual GPU, in nanoseconds, ascending."""


@dataclass(frozen=True, slots=True)
class MeasurementSummary:
    """The result of measuring one block at one batch size."""

    p50_ns: int
    p95_ns: int
    counted: int
    """Number of runs of all virtual GPUs that counted."""


def busy_window(all_runs: Sequence[Runs]) -> tuple[int, int]:
    """Returns the moments between which every virtual GPU was busy: (last start, first end)."""
    return max(runs[0][0] for runs in all_runs), min(runs[-1][1] for runs in all_runs)


def summarise(all_runs: Sequence[Runs]) -> MeasurementSummary | None:
    """Returns p50 and p95 over the runs of all virtual GPUs; None if they never overlapped.

    Args:
        all_runs: At least one run for each virtual GPU.
    """
    begin, end = busy_window(all_runs)
    span_ns = SHARED_SPAN_NS if len(all_runs) > 1 else 0
    single: list[npt.NDArray[np.int64]] = []
    grouped: list[float] = []
    for runs in all_runs:
        moments = np.array(runs, np.int64)
        inside = moments[(moments[:, 0] >= begin) & (moments[:, 1] <= end)]
        if len(inside):
            single.append(inside[:, 1] - inside[:, 0])
            grouped += _groups(inside, span_ns)
    if not single:
        return None
    durations = np.concatenate(single)
    p50 = max(1, round(float(np.median(grouped))))
    p95 = round(float(np.percentile(durations, 95)))
    return MeasurementSummary(p50, max(p50, p95), len(durations))


def _groups(moments: npt.NDArray[np.int64], span_ns: int) -> list[float]:
    """Returns the time per run of successive groups that last `span_ns`; the rest is left out.

    If all runs together are shorter, they are one group.
    """
    times: list[float] = []
    first = 0
    for last in range(len(moments)):
        took = int(moments[last, 1] - moments[first, 0])
        if took >= span_ns or (last == len(moments) - 1 and not times):
            times.append(took / (last + 1 - first))
            first = last + 1
    return times
