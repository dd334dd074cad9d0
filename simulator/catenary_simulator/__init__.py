"""A virtual clock and a model of agents and links around the scheduler's own code.

Planning, layout, book and dispatch are the code that runs in service; the world they act on is
simulated, so that a policy can be tried with 100 GPUs, or 100,000, on a laptop.

    arrivals      processes of arrivals
    options       the options of a run
    simulate      one run
    load_factor   the largest load that keeps the SLOs
    result        the figures of a run
    core          the hot loop: event heap, devices, links
    chains        the same for generation over server chains: loop, clusters, workloads, baselines
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
