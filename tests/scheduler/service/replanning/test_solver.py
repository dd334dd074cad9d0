"""The solver's process: what it answers, and what becomes of a plan when it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.live import ChainCluster
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_scheduler.planning.search import SearchOrder
from catenary_scheduler.planning.search.question import ChainQuestion
from catenary_scheduler.replanning import solver as solver_module
from catenary_scheduler.replanning.solver import Solver
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InternalError, PlanInfeasible, Unavailable
from scheduling_cases.sized_decoders import sized_agent, sized_load, sized_model


def problem(slo_us: float = 100_000.0) -> PoolingProblem:
    times = np.array([[1_000.0, 1_500.0]] * 4)
    model = PooledModel("toy:1", 4, {("l4", 1): times}, (0, 8, 8, 8, 0), slo_us, slo_us * 0.4)
    return PoolingProblem((GpuClass("l4", 2),), (model,), 2)


async def test_it_answers_with_a_plan_and_the_time_batches_take_to_fill() -> None:
    found = await Solver(10.0).solve(problem())
    (model,) = found.plan.models
    assert model.throughput_rps == pytest.approx(2 * 2 / 6e-3, rel=0.01)
    assert found.problem.models[0].batch_build_us_per_row > 0
    assert any("toy:1" in line for line in found.lines)


async def test_an_impossible_task_names_its_model() -> None:
    with pytest.raises(PlanInfeasible, match="toy:1"):
        await Solver(10.0).solve(problem(slo_us=1_000.0))


async def test_a_question_is_answered_there_too() -> None:
    """Chains need no solver, so nothing but the start of a process takes its time."""
    agents = (sized_agent("a", 10**6), sized_agent("b", 10**6))
    load = sized_load(sized_model(ModelKey("llm", "1")))
    cluster = ChainCluster(agents, (load,), {}, {}, Placement(()))
    question = ChainQuestion(cluster, SearchOrder.THROUGHPUT, ("a note",))
    found = await Solver(60.0).answer(question, 60.0)
    assert (found.notes, found.options[0].why_not) == (("a note",), "")
    none = replace(cluster, agents=(sized_agent("a", 10),))
    with pytest.raises(PlanInfeasible, match="llm:1"):
        await Solver(60.0).answer(replace(question, cluster=none), 60.0)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("import time\ntime.sleep(60)", Unavailable, "no plan within 0.1 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", InternalError, "code -9"),
        ("raise ZeroDivisionError('oh')", InternalError, "ZeroDivisionError: oh"),
        ("print('hello')", InternalError, "cannot be read"),
        ("import pickle, sys\npickle.dump(1, sys.stdout.buffer)", InternalError, "something else"),
    ],
)
async def test_whatever_becomes_of_the_process_costs_one_plan(
    source: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sick_solver.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(solver_module, "_GRACE_S", 0.5)
    with pytest.raises(error, match=said):
        await Solver(0.1, "sick_solver").solve(problem())
    assert not children()


async def test_the_event_loop_goes_on_while_it_thinks_and_giving_up_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_solver.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    solving = asyncio.ensure_future(Solver(30.0, "slow_solver").solve(problem()))
    async with asyncio.timeout(30):
        while not children():
            await asyncio.sleep(0.001)
    assert not solving.done(), "it thinks for longer than that"
    solving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await solving
    assert not children()


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "solver" in " ".join(child.cmdline())
    ]
