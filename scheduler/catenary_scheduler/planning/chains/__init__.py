"""Server chains: the blocks of a decoder model that every server hosts, and chains over them.

problem       the task (`ChainTask`) and its answer (`Composition`)
gbp_cr, gca   the paper's placement and cache allocation (Algorithms 1 and 2)
bounds        mean response times by Theorem 3.7
tuning        the choice of c; `best_composition` is what a deployment calls
recompose     the same when servers come and go or the load drifts, moving few blocks

Source: Sun, He, Hou, "Serving Chain-structured Jobs with Large Memory Footprints".
"""

from catenary_scheduler.planning.chains.bounds import ResponseBounds, response_bounds
from catenary_scheduler.planning.chains.gbp_cr import BlockPlacement, gbp_cr
from catenary_scheduler.planning.chains.gca import gca
from catenary_scheduler.planning.chains.problem import (
    ChainTask,
    ComposedChain,
    ComposedHop,
    Composition,
    Evaluator,
    HostedBlocks,
    PeakRate,
    Server,
    Tuning,
)
from catenary_scheduler.planning.chains.recompose import recompose
from catenary_scheduler.planning.chains.tuning import (
    TunedCapacity,
    best_composition,
    compose,
    tune_by_bound,
    tune_by_evaluation,
)

__all__ = [
    "BlockPlacement",
    "ChainTask",
    "ComposedChain",
    "ComposedHop",
    "Composition",
    "Evaluator",
    "HostedBlocks",
    "PeakRate",
    "ResponseBounds",
    "Server",
    "TunedCapacity",
    "Tuning",
    "best_composition",
    "compose",
    "gbp_cr",
    "gca",
    "recompose",
    "response_bounds",
    "tune_by_bound",
    "tune_by_evaluation",
]
