"""Answers to questions. They take seconds and the linear solver: for a process of its own."""

from __future__ import annotations

from catenary_scheduler.planning.live.chains import Compose, chain_jobs
from catenary_scheduler.planning.pooled.planner import Clock
from catenary_scheduler.planning.search.options import PlanAnswer
from catenary_scheduler.planning.search.pools import search_pools
from catenary_scheduler.planning.search.question import ChainQuestion, PlanQuestion
from catenary_scheduler.planning.search.search import search_chains
from catenary_scheduler.planning.search.words import answer_of


def answered(
    question: PlanQuestion, compose: Compose, time_limit_s: float, clock: Clock
) -> PlanAnswer:
    """Returns the answer to a question.

    Args:
        question: The model and the devices.
        compose: Composes chains.
        time_limit_s: Time for solving, in seconds.
        clock: Clock for the time that solving takes.

    Raises:
        PlanInfeasible: The devices cannot serve the model.
    """
    if isinstance(question, ChainQuestion):
        (job,) = chain_jobs(question.cluster)
        return answer_of(
            search_chains(job, question.cluster, compose, question.order), question.notes
        )
    return search_pools(question, time_limit_s, clock)
