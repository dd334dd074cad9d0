"""Options of a simulation run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import floor
from typing import Protocol

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import Dispatcher
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds
from catenary_simulator.arrivals import ArrivalProcess, PoissonArrivals


class SimulatedDispatcher(Dispatcher, Protocol):
    """A dispatcher with counters and decision times."""

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start, and present values of gauges, by name."""
        ...

    def take_decision_times(self) -> list[Nanoseconds]:
        """Returns the duration of each decision since the last call."""
        ...


class DispatcherFactory(Protocol):
    """A factory of the dispatcher of a run."""

    def __call__(
        self, config: PooledConfig, /, *, stopwatch: Callable[[], Nanoseconds]
    ) -> SimulatedDispatcher:
        """Returns a dispatcher without agents that times its decisions by the stopwatch."""
        ...


SIMULATED = PooledConfig(
    max_linger_ns=None,
    safety_margin_ns=1000,
    dispatch_lead_ns=0,
    max_queued_rows=1 << 30,
    max_requests=1 << 30,
    overdue_grace_ns=1000 * NANOSECONDS_PER_MILLISECOND,
)
"""Dispatcher settings with the paper's waiting rule, and no margins for a real network.

A batch counts as lost only after a second, because simulated agents lose nothing, and a straggler
that is computed twice is later still.
"""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Differences between the simulated reality and the profile."""

    compute_cv: float = 0.0
    """Coefficient of variation of compute times (log-normal, mean as profiled)."""
    transfer_cv: float = 0.0
    """Coefficient of variation of transfer times (log-normal)."""
    straggler_probability: float = 0.0
    """Probability that a batch takes `straggler_factor` times as long on a device."""
    straggler_factor: float = 3.0
    report_delay_ns: Nanoseconds = 0
    """Delay of reports and results on their way to the dispatcher."""
    clock_error_ns: Nanoseconds = 0
    """The largest constant error of a server's clock; errors are uniform between minus and plus
    this."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of one run.

    `base_rps` has the requests per second of each model, by name, at load factor 1, which `load`
    multiplies. The offered rates are whole numbers, as in the reference's runs.
    """

    base_rps: Mapping[str, float]
    load: float = 1.0
    duration_s: float = 30.0
    seed: int = 1
    arrivals: ArrivalProcess = field(default_factory=PoissonArrivals)
    dispatcher: DispatcherFactory = PooledDispatcher
    disturbance: Disturbance = field(default_factory=Disturbance)
    config: PooledConfig = SIMULATED


def offered_rps(base_rps: float, load: float) -> float:
    """Returns the offered rate, floor(load x floor(base)) as in the reference; exact below 1/s."""
    whole = floor(load * floor(base_rps) + 1e-9)
    return float(whole) if whole >= 1 else load * base_rps
