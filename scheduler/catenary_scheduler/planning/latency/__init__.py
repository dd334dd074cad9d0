"""Latency lines of workers: fitted, refitted at run time, added up over chains (Aladdin, 3.1).

nnls       least squares without negative coefficients, from the normal equations
fitting    eq. 1-3 from profiles, with a flat floor for short prompts
intervals  intervals that should contain measurements
errors     errors of recent predictions
refit      lines that follow agents' reports, with forgetting and the measurement at load as prior
observed   one partition on one agent: its reports, and its present cost
hops       the lines of a chain: its hops added up, with the ways between them
cluster    the lines of any chain of a model, from what its agents measured
shape      the number of devices that a worker should have (eq. 5-6)

Times are nanoseconds as floats; `catenary_services.domain.latency` names the coefficients.
"""

from catenary_scheduler.planning.latency.cluster import ClusterLines
from catenary_scheduler.planning.latency.errors import ErrorWindow
from catenary_scheduler.planning.latency.fitting import (
    CacheSample,
    DecodeSample,
    LatencyFit,
    PrefillSample,
    fit_cache,
    fit_decode,
    fit_prefill,
    lines_of,
)
from catenary_scheduler.planning.latency.hops import HopCost, cache_line, chain_lines
from catenary_scheduler.planning.latency.intervals import PredictionInterval
from catenary_scheduler.planning.latency.observed import (
    ObservedCost,
    WorkTotals,
    expected_work_ns,
    moved,
)
from catenary_scheduler.planning.latency.refit import LineRefit, RefitPolicy
from catenary_scheduler.planning.latency.shape import (
    DeviceScaling,
    DeviceShape,
    WorkerDemand,
    best_shape,
    fit_compute,
    throughput,
)

__all__ = [
    "CacheSample",
    "ClusterLines",
    "DecodeSample",
    "DeviceScaling",
    "DeviceShape",
    "ErrorWindow",
    "HopCost",
    "LatencyFit",
    "LineRefit",
    "ObservedCost",
    "PredictionInterval",
    "PrefillSample",
    "RefitPolicy",
    "WorkTotals",
    "WorkerDemand",
    "best_shape",
    "cache_line",
    "chain_lines",
    "expected_work_ns",
    "fit_cache",
    "fit_compute",
    "fit_decode",
    "fit_prefill",
    "lines_of",
    "moved",
    "throughput",
]
