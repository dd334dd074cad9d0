"""Planning, from models and agents to a `Plan`: pure functions, no I/O.

placement    what a person may write: which blocks run where, and how many rows a batch has
even_split   a pipeline made from nothing but block times and the agents that are present
replicas     a placement that replicates whole models first, as far as memory allows
complete     placement and measured times to a `Plan`, or `PlanInfeasible` naming the constraint
"""

from catenary_scheduler.planning.chain_placement import (
    ChainPlacement,
    HopPlacement,
    HostPlacement,
    hosts_for,
    without_agents,
)
from catenary_scheduler.planning.complete import ChainLatency, ServiceTime, complete_plan
from catenary_scheduler.planning.even_split import DeployedModel, balanced_ranges, even_split
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    PlacementDefaults,
    StagePlacement,
    parse_placement,
    placement_document,
)
from catenary_scheduler.planning.replicas import replicated

__all__ = [
    "ChainLatency",
    "ChainPlacement",
    "DeployedModel",
    "HopPlacement",
    "HostPlacement",
    "ModelPlacement",
    "PipelinePlacement",
    "Placement",
    "PlacementDefaults",
    "ServiceTime",
    "StagePlacement",
    "balanced_ranges",
    "complete_plan",
    "even_split",
    "hosts_for",
    "parse_placement",
    "placement_document",
    "replicated",
    "without_agents",
]
