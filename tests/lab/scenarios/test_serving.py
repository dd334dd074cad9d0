"""The search for the largest load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from catenary_lab.scenarios.pools.jobs import (
    Load,
    LoadFactorJob,
    OfInstance,
    OfModel,
    Plan,
    planned,
    prepared,
)
from catenary_lab.scenarios.runner import run_all
from catenary_simulator.load_factor import Search, capacity_rps, search
from catenary_simulator.options import SimulationOptions
from catenary_simulator.result import ModelResult
from catenary_simulator.simulate import SimulationSetup, run

PLAN_OF = OfInstance("set/even/G/tiny")
LOAD = Load("poisson", "own", 2.0, 1)


def test_factors_go_down_to_nothing() -> None:
    assert list(Search(step=0.25).factors(2.0)) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert list(Search(step=0.25).factors(0.6)) == [0.5, 0.25, 0.0]
    assert list(Search(highest=0.3, step=0.1).factors(1.0)) == [0.3, 0.2, 0.1, 0.0]


def full_search(setting: SimulationSetup, options: SimulationOptions) -> dict[str, ModelResult]:
    """Tries every factor there is."""
    found: dict[str, ModelResult] = {}
    for step in range(20, -1, -1):
        for model in run(setting, replace(options, load=round(step * 0.05, 2))).models:
            if model.attainment >= 0.99:
                found.setdefault(model.name, model)
    return found


@pytest.mark.parametrize("planner", ["catenary", "np", "dart-r"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_search_finds_what_trying_every_factor_finds(
    tiny: Path, planner: str, seed: int
) -> None:
    plan = Plan(tiny, PLAN_OF, planner)  # type: ignore[arg-type]
    load = Load("poisson", "catenary", 1.0, seed)
    setting, options = prepared(plan, load, "reservation")
    found = search(setting, options, Search())
    assert found.models == full_search(setting, options)


def test_what_no_device_can_compute_is_not_tried(tiny: Path) -> None:
    setting, options = prepared(Plan(tiny, PLAN_OF, "np"), LOAD, "reservation")
    for model in setting.plan.models:
        assert capacity_rps(model) >= options.base_rps[model.model.name] * 0.999
    assert search(setting, options, Search(highest=50.0)).models.keys() == {"north", "south"}


def test_equal_jobs_are_done_once_and_by_any_number_of_processes(tiny: Path) -> None:
    jobs = [
        LoadFactorJob(Plan(tiny, PLAN_OF, planner), LOAD, "reservation", Search(step=0.25))
        for planner in ("catenary", "np", "catenary")
    ]
    done: list[str] = []
    here = run_all(jobs, 1, done.append)
    assert done == ["1 of 2 simulations", "2 of 2 simulations"]
    elsewhere = run_all(jobs, 2)
    assert [here[job].models for job in jobs] == [elsewhere[job].models for job in jobs]


def test_a_model_alone_is_planned_on_the_cluster_asked_for(tiny: Path) -> None:
    task = OfModel("tiny", "north", (1, 3), slo_scale=5.0, margin=0.4)
    setting, options = prepared(Plan(tiny, task, "catenary"), LOAD, "reservation")
    assert setting.gpus == {"fast": 1, "slow": 3}
    assert options.base_rps["north"] > 0


def test_a_smaller_margin_promises_more_but_never_exceeds_the_instances(tiny: Path) -> None:
    promised = {
        margin: planned(Plan(tiny, PLAN_OF, "catenary", margin=margin))[1].objective
        for margin in (0.0, 0.4, 0.9)
    }
    assert promised[0.0] > promised[0.4]
    assert promised[0.9] == promised[0.4]


def test_noise_reaches_the_simulator(tiny: Path) -> None:
    quiet = prepared(Plan(tiny, PLAN_OF, "catenary"), LOAD, "reservation")
    noisy = prepared(Plan(tiny, PLAN_OF, "catenary"), replace(LOAD, noise=0.3), "reservation")
    latencies = [
        run(setting, replace(options, load=0.5)).models[0].p99_ms
        for setting, options in (quiet, noisy)
    ]
    assert latencies[0] != latencies[1]
