"""Makes the dispatcher, the planner and what answers questions, as the settings describe them."""

from __future__ import annotations

import time
from dataclasses import replace

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import ChainedDispatcher, CombinedDispatcher, PooledDispatcher
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning.live import ChainCluster, PlanningRules
from catenary_scheduler.replanning.agent_stability import AgentStability
from catenary_scheduler.replanning.chain_builder import NO_AGENTS, ChainBuilder
from catenary_scheduler.replanning.plan_builder import PlanBuilder
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.replanning.questions import PlanQuestions, QuestionRules
from catenary_scheduler.replanning.solver import Solver
from catenary_scheduler.runtime.dispatch_loop import DispatchLoop
from catenary_scheduler.scaling import LoadReplanning, SessionDemand
from catenary_scheduler.settings import SchedulerSettings


def dispatcher_of(
    settings: SchedulerSettings,
    book: Book,
    availability: Availability,
    times: BookedTimes,
    first_id: int,
) -> CombinedDispatcher:
    """Returns a dispatcher without a plan.

    Args:
        settings: Limits and policies.
        book: The book that its reservations are entered in.
        availability: Says which agents can be given work.
        times: Recent durations of work, which reservations are made for.
        first_id: Smallest id of its batches and of its sessions.
    """
    pooled = PooledDispatcher(
        settings.dispatching(),
        book=book,
        availability=availability,
        times=times,
        first_batch=first_id,
    )
    chained = ChainedDispatcher(
        settings.dispatching_sessions(),
        book,
        availability=availability,
        policy=settings.chain_policy,
        first_session=first_id,
    )
    return CombinedDispatcher(pooled, chained, book)


def planner_of(
    settings: SchedulerSettings,
    deployments: Deployments,
    measured: MeasuredProfiles,
    availability: Availability,
) -> Planner:
    """Returns a planner whose clock starts now."""
    rules = _pool_rules(settings)
    solver = Solver(settings.plan_time_limit_s)
    chains = ChainBuilder(
        deployments,
        measured,
        solver.compose,
        _chain_rules(settings),
    )
    maker = PlanBuilder(settings.planner, rules, deployments, measured, solver.solve, chains)
    stability = AgentStability(settings.settle_s, settings.replan_after_s, settings.expected_agents)
    replanning = LoadReplanning(settings.replan_policy())
    demand = SessionDemand(settings.demand_policy())
    return Planner(maker, stability, replanning, time.monotonic(), demand, availability)


def questions_of(
    settings: SchedulerSettings,
    deployments: Deployments,
    measured: MeasuredProfiles,
    planner: Planner,
    loop: DispatchLoop,
) -> PlanQuestions:
    """Returns what answers questions about plans by the rules that the planner keeps."""
    return PlanQuestions(
        deployments,
        measured,
        QuestionRules(_pool_rules(settings), _chain_rules(settings)),
        Solver(settings.plan_time_limit_s).answer,
        planner.session_load,
        lambda: loop.decision_ns,
    )


def _pool_rules(settings: SchedulerSettings) -> PlanningRules:
    return PlanningRules(
        settings.plan_margin, settings.plan_max_partitions, settings.plan_shared_routes
    )


def _chain_rules(settings: SchedulerSettings) -> ChainCluster:
    return replace(
        NO_AGENTS,
        partitions=settings.chain_agents,
        prefill_agents=settings.split_prefill_agents,
        oversubscription=settings.cache_oversubscription,
        survival_first=settings.planner != "pooled",
    )
