"""Planners on a live cluster: from its agents to a problem, and from a plan to its agents.

groups        agents that are alike, which the planner calls a class of GPUs
estimates     times of every class before anybody measured it, from data sheets
profiles      block times of every model on every group, corrected by agents' measurements
problem       all of it as a `PoolingProblem`, or `PlanInfeasible` naming what is unknown
place         a `PooledPlan` on the agents, with as few moves as possible
generation    costs of a session on an agent, from measurements
generation_estimates  the same from a data sheet, for questions
links         links between servers, as agents measured them
agent_memory  memory of agents for a model, and the size that the model has on each of them
chains        chains of agents for the models that generate text, in the memory pooled models leave
rings         such chains where the number of agents per chain is given
roles         such chains where some agents run prompts for the others
"""

from catenary_scheduler.planning.live.chains import (
    ChainCluster,
    ChainJob,
    ChainLoad,
    Compose,
    chain_jobs,
    explain_chains,
    jobs_by_role,
    placed,
    solve_job,
    solve_roles,
    taken_by,
)
from catenary_scheduler.planning.live.estimates import completed
from catenary_scheduler.planning.live.generation import (
    USUAL_FRAME_NS,
    ChainCosts,
    GenerationCost,
    GenerationTimes,
    SessionShape,
)
from catenary_scheduler.planning.live.groups import DeviceGroup, device_groups
from catenary_scheduler.planning.live.links import (
    LOCAL_WAY_NS,
    NO_LINKS,
    LinkFigures,
    ServerLinks,
    ServerPair,
)
from catenary_scheduler.planning.live.place import Hosted, place
from catenary_scheduler.planning.live.problem import (
    LiveCluster,
    LiveModel,
    PlanningRules,
    pooling_problem,
    with_batch_building,
)
from catenary_scheduler.planning.live.profiles import MeasuredTimes, corrections, origins
from catenary_scheduler.planning.live.roles import joined_roles

__all__ = [
    "LOCAL_WAY_NS",
    "NO_LINKS",
    "USUAL_FRAME_NS",
    "ChainCluster",
    "ChainCosts",
    "ChainJob",
    "ChainLoad",
    "Compose",
    "DeviceGroup",
    "GenerationCost",
    "GenerationTimes",
    "Hosted",
    "LinkFigures",
    "LiveCluster",
    "LiveModel",
    "MeasuredTimes",
    "PlanningRules",
    "ServerLinks",
    "ServerPair",
    "SessionShape",
    "chain_jobs",
    "completed",
    "corrections",
    "device_groups",
    "explain_chains",
    "jobs_by_role",
    "joined_roles",
    "origins",
    "place",
    "placed",
    "pooling_problem",
    "solve_job",
    "solve_roles",
    "taken_by",
    "with_batch_building",
]
