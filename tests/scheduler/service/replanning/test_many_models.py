"""Many small models on few GPUs: more models than agents, and agents too slow for some."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import DeployedModel, Placement
from catenary_scheduler.planning.live import PlanningRules
from catenary_scheduler.planning.pooled import plan_pools
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.replicas import without_room
from catenary_scheduler.replanning.pooled_builder import PooledBuilder, PooledRequest
from catenary_scheduler.replanning.solver import SolverResult
from catenary_services.domain.ids import AgentId, ModelKey, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.models.model_repository import ModelRepository
from scheduler_harness import MS, add_model

BLOCKS = 4
L4_BYTES, P4_BYTES = 24_000_000_000, 8_000_000_000
BLOCK_BYTES = 400_000_000
SLO_MS = 2_000
"""Of `add_model`; 0.4 of it are kept free."""


async def deployed(
    tmp_path: Path, models: int, block_ms: tuple[float, float] | None = None
) -> Deployments:
    """Returns models with times of a block on an L4 and a P4.

    Without times they take 0.1 s on an L4, and every other one its SLO on a P4.
    """
    repository = ModelRepository(tmp_path / "models")
    keys = [ModelKey(f"m{number}", "1") for number in range(models)]
    for number, key in enumerate(keys):
        add_model(tmp_path / "models", key)
        l4_ms, p4_ms = block_ms or (25, SLO_MS / BLOCKS if number % 2 else 50)
        devices = [
            DeviceProfile(name, 1, False, "a test", (1,), rows, rows)
            for name, ms in (("L4", l4_ms), ("P4", p4_ms))
            for rows in [((round(ms * MS),),) * BLOCKS]
        ]
        cuts = (0, *(64,) * (BLOCKS - 1), 0)
        profile = ModelProfile(key, "0" * 64, BLOCKS, cuts, (BLOCK_BYTES,) * BLOCKS, tuple(devices))
        repository.write_profile(key, profile)
    deployments = Deployments(repository)
    await deployments.want([key.name for key in keys])
    return deployments


def agents(l4: int, p4: int) -> tuple[Agent, ...]:
    kinds = [("L4", L4_BYTES)] * l4 + [("P4", P4_BYTES)] * p4
    return tuple(
        Agent(AgentId(f"{kind}-{at}"), kind, ServerId(f"s-{at}"), memory, 10**9)
        for at, (kind, memory) in enumerate(kinds)
    )


async def solved(problem: PoolingProblem) -> SolverResult:
    return SolverResult(problem, plan_pools(problem, time_limit_s=1.0, clock=time.perf_counter), ())


@pytest.mark.parametrize(("models", "l4", "p4"), [(6, 1, 2), (300, 25, 75)])
async def test_more_models_than_agents_are_planned_where_each_is_in_time(
    tmp_path: Path, models: int, l4: int, p4: int
) -> None:
    deployments = await deployed(tmp_path, models)
    there = agents(l4, p4)
    asked = tuple(each.for_planning() for each in deployments.ready.values())

    def able(model: DeployedModel) -> tuple[Agent, ...]:
        return there

    builder = PooledBuilder(
        PlanningRules(), deployments, MeasuredProfiles(), solved, survival_first=True
    )
    request = PooledRequest("a test", asked, there, able, {}, {}, 0.9, Placement(()))
    built = await builder.made(request)
    assert built.objective_rps > 0.0
    assert without_room(asked, built.placement, there) == []
    for number, model in enumerate(built.placement.models):
        kinds = {
            str(agent).partition("-")[0]
            for pipeline in model.pipelines
            for stage in pipeline.stages
            for agent in stage.agents
        }
        if number % 2:
            assert "L4" in kinds, model.model


async def test_pools_of_a_plan_host_the_other_models_where_memory_allows(tmp_path: Path) -> None:
    """P4 are too slow for whole models, so pools are cut, and an L4 is in those of one model."""
    deployments = await deployed(tmp_path, 2, (200, 320))
    there = agents(2, 2)
    asked = tuple(each.for_planning() for each in deployments.ready.values())

    async def built(rules: PlanningRules) -> Placement:
        builder = PooledBuilder(
            rules, deployments, MeasuredProfiles(), solved, survival_first=False
        )
        request = PooledRequest("a test", asked, there, lambda _: there, {}, {}, 0.9, Placement(()))
        return (await builder.made(request)).placement

    own = await built(PlanningRules(shared_routes=False))
    assert not any(pipeline.is_shared for model in own.models for pipeline in model.pipelines)
    shared = await built(PlanningRules())
    for before, after in zip(own.models, shared.models, strict=True):
        guests = [pipeline for pipeline in after.pipelines if pipeline.is_shared]
        assert guests
        assert after.pipelines == (*before.pipelines, *guests)
    assert without_room(asked, shared, there) == []
