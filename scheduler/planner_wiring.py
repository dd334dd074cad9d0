"""A planner as the settings want it."""

from __future__ import annotations

import time

from scheduler.chain_making import ChainMaker
from scheduler.deployments import Deployments
from scheduler.dispatch.availability import Availability
from scheduler.measured import Measured
from scheduler.patience import Patience
from scheduler.plan_making import PlanMaker
from scheduler.planner import Planner
from scheduler.planning.live import PlanningRules
from scheduler.scaling import Replanning, SessionDemand
from scheduler.settings import SchedulerSettings
from scheduler.solver import Solver


def planner_of(
    settings: SchedulerSettings,
    deployments: Deployments,
    measured: Measured,
    availability: Availability,
) -> Planner:
    """Returns a planner that begins now."""
    rules = PlanningRules(settings.plan_margin, settings.plan_max_partitions)
    solver = Solver(settings.plan_time_limit_s)
    chains = ChainMaker(
        deployments, measured, solver.compose, settings.chain_agents, settings.split_prefill_agents,
        settings.cache_oversubscription,
    )  # fmt: skip
    maker = PlanMaker(settings.planner, rules, deployments, measured, solver.solve, chains)
    patience = Patience(settings.settle_s, settings.replan_after_s, settings.expected_agents)
    replanning = Replanning(settings.replan_policy())
    demand = SessionDemand(settings.demand_policy())
    return Planner(maker, patience, replanning, time.monotonic(), demand, availability)
