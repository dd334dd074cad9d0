"""From models and agents to a `Plan`: pure functions, no I/O.

placement    what a person may write: which blocks run where, and how many rows a batch has
even_split   a placement made from nothing but block times and the agents present
complete     placement + measured times -> Plan, or `PlanInfeasible` naming the constraint
"""

from scheduler.planning.complete import complete_plan
from scheduler.planning.even_split import DeployedModel, balanced_ranges, even_split
from scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    PlacementDefaults,
    StagePlacement,
    parse_placement,
    placement_document,
)

__all__ = [
    "DeployedModel",
    "ModelPlacement",
    "PipelinePlacement",
    "Placement",
    "PlacementDefaults",
    "StagePlacement",
    "balanced_ranges",
    "complete_plan",
    "even_split",
    "parse_placement",
    "placement_document",
]
