"""Comparison of placements by what they serve, by what they survive, and by the agents they use.

promises    the load that a placement takes within the objectives, whoever made it
choice      the better of two placements: survival first, then the load
idle        why an agent is used by no pipeline, and what would use it
"""

from catenary_scheduler.planning.comparing.choice import (
    Candidate,
    better,
    candidate,
    why_not,
    with_idle_agents,
)
from catenary_scheduler.planning.comparing.idle import idle_reasons
from catenary_scheduler.planning.comparing.promises import PlacementThroughput, promise_of

__all__ = [
    "Candidate",
    "PlacementThroughput",
    "better",
    "candidate",
    "idle_reasons",
    "promise_of",
    "why_not",
    "with_idle_agents",
]
