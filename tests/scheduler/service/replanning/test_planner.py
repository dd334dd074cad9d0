"""The planner alone: when it thinks again, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentRegistry, AgentState
from catenary_scheduler.observed.links import MeasuredLink
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.live import LinkFigures, PlanningRules
from catenary_scheduler.planning.pooled.problem import (
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.replanning.agent_stability import AgentStability
from catenary_scheduler.replanning.plan_builder import PlanBuilder
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.replanning.solver import SolverResult
from catenary_scheduler.scaling import LoadReplanning, ReplanPolicy
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.errors import InternalError, PlanInfeasible
from catenary_services.models.model_repository import ModelRepository
from scheduler_harness import MS, TOY, add_model, unconnected, until

OTHER = ModelKey("other", "1")
SETTLED_S = 100.0
"""Long after every agent came."""
BLOCK_BYTES = 160_000_000
"""Of which an agent has room for one model."""
Solve = Callable[[PoolingProblem], Awaitable[SolverResult]]


def whole_on(toy: int = 1) -> Solve:
    """Returns a solver that gives the toy model some agents and every other model one."""

    async def solve(problem: PoolingProblem) -> SolverResult:
        models = []
        for model in problem.models:
            agents = toy if model.name == str(TOY) else 1
            part = PooledPartition("l4", 1, 0, 4, agents, agents)
            pipeline = PooledPipeline(1, 250.0 * agents, 4e3, (part,))
            models.append(PooledModelPlan(model.name, 250.0 * agents, (pipeline,)))
        plan = PooledPlan(250.0, 250.0, True, "test", 0.0, tuple(models))
        return SolverResult(problem, plan, ("It is a test.",))

    return solve


async def deployed(tmp_path: Path) -> Deployments:
    repository = ModelRepository(tmp_path / "models")
    for key in (TOY, OTHER):
        add_model(tmp_path / "models", key)
        rows = ((MS,),) * 4
        device = DeviceProfile("l4", 1, False, "a test", (1,), rows, rows)
        profile = ModelProfile(key, "0" * 64, 4, (0, 64, 64, 64, 0), (BLOCK_BYTES,) * 4, (device,))
        repository.write_profile(key, profile)
    deployments = Deployments(repository)
    await deployments.want(["toy", "other"])
    return deployments


def registry(*names: str) -> AgentRegistry:
    found: AgentRegistry = {}
    for name in names:
        agent = Agent(AgentId(name), "l4", ServerId(name), 10**9, 10**9)
        session = unconnected()
        found[agent.agent_id] = AgentState(agent, 1, common_pb2.Peer(), "emulated:l4", 0.0, session)
    return found


class Bench:
    """A planner with a scripted solver."""

    def __init__(self, deployments: Deployments, solve: Solve) -> None:
        self.solve = solve
        self.asked = 0

        async def counted(problem: PoolingProblem) -> SolverResult:
            self.asked += 1
            return await self.solve(problem)

        self.measured = MeasuredProfiles()
        maker = PlanBuilder("pooled", PlanningRules(), deployments, self.measured, counted)
        policy = ReplanPolicy(lasting_ns=0, interval_ns=0, least_rows=10.0)
        self.planner = Planner(maker, AgentStability(), LoadReplanning(policy), 0.0)
        self.models = [each.for_planning() for each in deployments.ready.values()]
        self.registry = registry("a", "b")

    def follow(self, now_s: float = SETTLED_S) -> Placement | None:
        return self.planner.follow(self.models, self.registry, now_s)

    async def settle(self) -> Placement | None:
        self.follow()
        await until(lambda: not self.planner.is_thinking, "it has thought")
        return self.follow()


async def test_it_keeps_what_it_has_until_the_answer_is_there(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    assert bench.follow() is None
    assert bench.planner.problem == "a plan is being made"
    first = await bench.settle()
    assert first is not None
    bench.registry.update(registry("c"))
    assert bench.follow() == first
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert bench.follow() != first
    assert bench.planner.provenance is not None
    assert bench.planner.provenance.cause == "c came"


async def test_a_newer_question_makes_the_older_answer_worthless(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    released = asyncio.Event()

    async def slow(problem: PoolingProblem) -> SolverResult:
        await released.wait()
        raise PlanInfeasible("an answer of long ago")

    bench.solve = slow
    bench.follow()
    await until(lambda: bench.asked == 1, "it thinks")
    bench.solve = whole_on()
    bench.registry.update(registry("c"))
    bench.follow()
    released.set()
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert bench.planner.provenance is not None
    assert (bench.planner.provenance.planner, bench.asked) == ("pooled", 2)


async def test_a_plan_that_is_no_better_is_not_worth_a_switch(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    first = await bench.settle()
    now_s = time.monotonic() + SETTLED_S
    bench.planner.load.rates.arrived(TOY, 1000, int(now_s * 1e9))
    bench.follow(now_s)
    await until(lambda: bench.asked == 2, "it thinks again")
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert bench.follow(now_s) == first
    assert bench.planner.provenance is not None
    assert bench.planner.provenance.cause == "a, b came and toy:1, other:1 was deployed"
    assert bench.asked == 2  # and the load is no reason any more


async def test_a_notably_better_plan_is(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    bench.registry = registry("a", "b", "c", "d")
    await bench.settle()
    now_s = now_ns() / 1e9 + SETTLED_S
    bench.planner.load.rates.arrived(TOY, 1000, int(now_s * 1e9))
    bench.solve = whole_on(toy=3)
    bench.follow(now_s)
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert bench.planner.provenance is not None
    assert "of the load moved" in bench.planner.provenance.cause
    # One row takes an agent 4 ms.
    assert bench.planner.provenance.throughput_rps[TOY] == pytest.approx(750.0)


async def test_measured_times_that_differ_from_those_of_the_plan_cause_another(
    tmp_path: Path,
) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    await bench.settle()
    agent = AgentId("a")
    now_s = now_ns() / 1e9 + SETTLED_S
    bench.measured.put(agent, PartitionKey(TOY, 0, 4), [4 * MS])
    bench.follow(now_s)
    assert not bench.planner.is_thinking  # as it was planned for
    bench.measured.put(agent, PartitionKey(TOY, 0, 4), [12 * MS])
    bench.follow(now_s + 2)
    assert bench.planner.is_thinking
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    bench.follow(now_s + 4)
    assert bench.asked == 2  # the new times are known now


async def test_cards_that_were_measured_to_be_slow_are_a_reason_to_solve_anew(
    tmp_path: Path,
) -> None:
    seen: list[float] = []
    solve = whole_on()

    async def watched(problem: PoolingProblem) -> SolverResult:
        seen.extend(each.server_bits_per_second for each in problem.classes)
        return await solve(problem)

    bench = Bench(await deployed(tmp_path), watched)
    await bench.settle()
    now_s = now_ns() / 1e9 + SETTLED_S
    bench.follow(now_s)
    assert seen == [8e9]
    for pair in ((ServerId("a"), ServerId("b")), (ServerId("b"), ServerId("a"))):
        figures = LinkFigures(MS, 6_250_000)
        bench.measured.links.put(pair, MeasuredLink(figures, 1_790_000_000, ""))
    bench.follow(now_s + 2)
    assert bench.planner.is_thinking
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert seen == [8e9, 50e6]
    assert bench.planner.provenance is not None
    assert "links of l4 are planned with 6.2 MB/s, as measured" in " ".join(
        bench.planner.provenance.in_words()
    )
    bench.follow(now_s + 4)
    assert bench.asked == 2  # the new rates are known now


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (PlanInfeasible("toy:1: too slow"), "toy:1: too slow"),
        (ZeroDivisionError(), "an internal error (ZeroDivisionError)"),
    ],
)
async def test_without_a_pooled_plan_the_models_are_split_evenly(
    tmp_path: Path, failure: Exception, said: str
) -> None:
    async def fails(problem: PoolingProblem) -> SolverResult:
        raise failure

    bench = Bench(await deployed(tmp_path), fails)
    placement = await bench.settle()
    assert placement is not None
    assert len(placement.models) == 2
    assert bench.planner.provenance is not None
    assert any(said in line for line in bench.planner.provenance.in_words())


async def test_a_solver_that_breaks_down_does_not_cost_a_plan_that_works(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    first = await bench.settle()

    async def crashes(problem: PoolingProblem) -> SolverResult:
        raise InternalError("the solver ended with exit code -9")

    bench.solve = crashes
    bench.planner.ask("a test")
    assert await bench.settle() == first
    assert bench.planner.problem == "no new plan was made: the solver ended with exit code -9"
    # Without the agents of that plan an even split is all there is.
    bench.registry = registry("x", "y")
    split = await bench.settle()
    assert split is not None
    assert agents_of(split) == {"x", "y"}


async def test_what_was_rejected_comes_again_later_and_ever_more_rarely(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    first = await bench.settle()
    assert first is not None
    other = Placement(first.models[:1])
    bench.planner.rejected(other, "no memory", SETTLED_S)
    assert bench.follow(SETTLED_S + 29.0) == other
    assert bench.planner.problem == "the last plan was given up: no memory"
    bench.follow(SETTLED_S + 30.0)
    await until(lambda: not bench.planner.is_thinking, "it has thought")
    assert bench.follow(SETTLED_S + 30.0) == first
    bench.planner.rejected(other, "no memory", SETTLED_S + 31.0)
    bench.follow(SETTLED_S + 90.0)
    assert not bench.planner.is_thinking
    bench.follow(SETTLED_S + 91.0)
    assert bench.planner.is_thinking
    await bench.planner.close()


async def test_giving_up_leadership_ends_the_thinking(tmp_path: Path) -> None:
    bench = Bench(await deployed(tmp_path), whole_on())
    bench.follow()
    assert bench.planner.is_thinking
    await bench.planner.close()
    await bench.planner.close()
    assert not bench.planner.is_thinking
