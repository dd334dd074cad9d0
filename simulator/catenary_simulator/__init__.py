"""A virtual clock and a model of agents and links around the scheduler's own code.

Planning, layout, book and dispatch are the code that runs in service; the world they act on is
simulated, so that a policy can be tried with 100 GPUs, or 100,000, on a laptop.

    arrivals      processes of arrivals
    options       the options of a run
    simulate      one run
    load_factor   the largest load that keeps the SLOs
    result        what was found
    kernel        the clock of all kinds: what is due, arrivals, the dispatcher's wake-ups
    core          pooled pipelines: devices and links
    chains        sessions over server chains: loop, clusters, workloads
    placement     sessions placed on workers under objectives
    packing       where caches live and how they move, epoch by epoch
"""

from catenary_simulator.arrivals import (
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
    parse_arrivals,
)
from catenary_simulator.load_factor import max_load_factor
from catenary_simulator.options import SIMULATED, Disturbance, SimulationOptions
from catenary_simulator.result import ModelResult, SimulationResult
from catenary_simulator.simulate import simulate

__all__ = [
    "SIMULATED",
    "Disturbance",
    "GammaArrivals",
    "ModelResult",
    "OnOffArrivals",
    "PoissonArrivals",
    "SimulationOptions",
    "SimulationResult",
    "max_load_factor",
    "parse_arrivals",
    "simulate",
]
