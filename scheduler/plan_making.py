"""Makes one plan: pooled if everything needed for it is known and it works out, else even."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from scheduler.deployments import Deployments
from scheduler.measured import Measured
from scheduler.plan_notes import EVEN, POOLED, PlanNotes
from scheduler.planning import DeployedModel, Placement, even_split
from scheduler.planning.live import (
    Hosted,
    LiveCluster,
    LiveModel,
    PlanningRules,
    estimated,
    place,
    pooling_problem,
    unknown,
)
from scheduler.planning.pooled.problem import PoolingProblem
from scheduler.solver import Solution
from services.domain.ids import ModelKey
from services.domain.plan import Agent
from services.errors import CatenaryError, PlanInfeasible
from services.log import get_logger

_log = get_logger(__name__)

Mode = Literal["auto", "pooled", "even"]
Solve = Callable[[PoolingProblem], Awaitable[Solution]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is wanted for, at one moment."""

    cause: str
    models: tuple[DeployedModel, ...]
    agents: tuple[Agent, ...]
    shares: Mapping[ModelKey, float]
    hosted: Hosted


@dataclass(frozen=True, slots=True)
class Made:
    """A plan."""

    placement: Placement
    notes: PlanNotes
    has_failed: bool = False
    """It is an even split because planning broke down, not because that is the best there is."""


class PlanMaker:
    """Makes plans as the setting `planner` says."""

    def __init__(
        self, mode: Mode, rules: PlanningRules, deployments: Deployments, measured: Measured,
        solve: Solve,
    ) -> None:  # fmt: skip
        self.mode = mode
        self._rules = rules
        self._deployments = deployments
        self._measured = measured
        self._solve = solve

    def split(self, wanted: Wanted, fallback: str = "", *, has_failed: bool = False) -> Made:
        """Returns an even split.

        Raises:
            PlanInfeasible: there is no agent, or a model has no blocks.
        """
        placement = even_split(wanted.models, wanted.agents)
        return Made(placement, PlanNotes(EVEN, wanted.cause, fallback), has_failed)

    async def make(self, wanted: Wanted) -> Made:
        """Returns a pooled plan; an even split if one cannot be made, with the reason in its notes.

        Raises:
            PlanInfeasible: there is no agent, or a model has no blocks.
        """
        try:
            made = await self._pooled(wanted)
        except PlanInfeasible as error:
            _log.warning("no_pooled_plan", error=error.message)
            return self.split(wanted, error.message)
        except CatenaryError as error:
            _log.error("no_pooled_plan", error=error.message)
            return self.split(wanted, error.message, has_failed=True)
        except Exception as error:
            _log.exception("no_pooled_plan")
            reason = f"of an internal error ({type(error).__name__}), see the log"
            return self.split(wanted, reason, has_failed=True)
        return made if isinstance(made, Made) else self.split(wanted, made)

    async def _pooled(self, wanted: Wanted) -> Made | str:
        """Returns the plan, or why none is tried."""
        await self._deployments.refresh_profiles()
        ready = self._deployments.ready
        models = tuple(
            LiveModel(
                model,
                ready[model.key].profile if model.key in ready else None,
                wanted.shares.get(model.key, 1.0),
            )
            for model in wanted.models
        )
        cluster = LiveCluster(wanted.agents, models, self._measured.everything())
        lacking = [
            *self._deployments.profile_problems.values(),
            *unknown(cluster.profiled, cluster.groups),
        ]
        if lacking and self.mode == "auto":
            return "; ".join(lacking)
        solution = await self._solve(pooling_problem(cluster, self._rules))
        placement, idle = place(
            (solution.problem, solution.plan), wanted.models, cluster.groups, wanted.hosted
        )
        remarks = [*lacking, *estimated(cluster.profiled, cluster.groups)]
        if idle:
            remarks.append(f"no pool can use {', '.join(idle)}")
        by_name = {str(model.key): model.key for model in wanted.models}
        notes = PlanNotes(
            POOLED,
            wanted.cause,
            lines=solution.lines,
            remarks=tuple(f"Note: {remark}." for remark in remarks),
            shares=dict(wanted.shares),
            throughput_rps={
                by_name[model.name]: model.throughput_rps for model in solution.plan.models
            },
        )
        return Made(placement, notes)
