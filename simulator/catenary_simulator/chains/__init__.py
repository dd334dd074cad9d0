"""Generation over server chains on a virtual clock, around the scheduler's own dispatcher.

anchors, cluster  places in the network, GPU slices, servers; the planning task they make
workload          sessions: drawn ones, or those of an Azure LLM trace
plan, serve       composed chains as a plan; how they serve a workload; tuning c by a replay
loop, result      the event heap; the figures of a run
"""

from catenary_simulator.chains.cluster import (
    ChainsCluster,
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    cluster_of,
)
from catenary_simulator.chains.result import ChainResult
from catenary_simulator.chains.serve import ReplayEvaluator, serve_chains
from catenary_simulator.chains.workload import SessionWorkload

__all__ = [
    "ChainResult",
    "ChainsCluster",
    "CommunicationCost",
    "DecoderModel",
    "GpuSlice",
    "ReplayEvaluator",
    "SessionWorkload",
    "cluster_of",
    "serve_chains",
]
