"""`catenaryd plan pools` as a script calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput, PlanInfeasible
from catenaryd.command_line import cli
from reference_data import reference
from scheduling_cases.tiny_dataset import write_dataset

TINY = "set/even/G/tiny"
PLAN_KEYS = {"objective", "models", "solver", "optimal", "bound", "seconds"}
MODEL_KEYS = {"name", "throughput_rps", "pipelines"}
PIPELINE_KEYS = {"batch", "throughput_rps", "latency_us", "partitions"}
PARTITION_KEYS = {"gpu", "vgpus_per_gpu", "blocks", "vgpus", "gpus"}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data")


@pytest.fixture(scope="module")
def ppipe_folder() -> Path:
    return reference("ppipe")


def _run(folder: Path, *arguments: str, instance: str = TINY) -> Result:
    return CliRunner().invoke(
        cli,
        ["plan", "pools", "--dataset", str(folder), "--instance", instance, *arguments],
    )


def _json(folder: Path, *arguments: str, instance: str = TINY) -> dict[str, Any]:
    result = _run(folder, *arguments, "--json", instance=instance)
    assert result.exit_code == 0, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_every_reference_instance_answers_with_the_promised_keys(ppipe_folder: Path) -> None:
    instances = json.loads((ppipe_folder / "instances.json").read_text())
    assert len(instances) >= 60
    for instance in instances:
        plan = _json(ppipe_folder, instance=instance["id"])
        assert set(plan) == PLAN_KEYS
        assert [model["name"] for model in plan["models"]] == [d["dnn"] for d in instance["dnns"]]
        for model in plan["models"]:
            assert set(model) == MODEL_KEYS
            for pipeline in model["pipelines"]:
                assert set(pipeline) == PIPELINE_KEYS
                assert all(set(part) == PARTITION_KEYS for part in pipeline["partitions"])
        assert plan["optimal"] is True
        assert plan["bound"] == plan["objective"]
        assert plan["seconds"] > 0
        weights = {dnn["dnn"]: dnn["weight"] for dnn in instance["dnns"]}
        shares = [m["throughput_rps"] / weights[m["name"]] for m in plan["models"]]
        assert min(shares) == pytest.approx(plan["objective"], rel=1e-8)


def test_whole_gpus_are_whole_numbers(tiny: Path) -> None:
    plan = _json(tiny, "--planner", "np")
    parts = [p for m in plan["models"] for line in m["pipelines"] for p in line["partitions"]]
    assert parts
    assert all(isinstance(part["gpus"], int) for part in parts)
    assert plan["solver"].startswith("np")


def test_partitions_follow_the_option_and_the_rules(tiny: Path) -> None:
    def longest(*arguments: str) -> int:
        plan = _json(tiny, *arguments)
        return max(len(p["partitions"]) for m in plan["models"] for p in m["pipelines"])

    assert longest("--max-partitions", "1") == 1
    assert longest("--rules", "reference") <= 2  # as the instance says
    one = _json(tiny, "--max-partitions", "1")["objective"]
    assert one <= _json(tiny, "--max-partitions", "2")["objective"] <= _json(tiny)["objective"]


def test_both_solvers_answer(tiny: Path) -> None:
    exact, found = _json(tiny, "--solver", "dp"), _json(tiny, "--solver", "highs")
    assert (exact["solver"], found["solver"]) == ("dp", "highs")
    assert found["objective"] <= exact["objective"] * (1 + 1e-6)
    assert found["bound"] >= found["objective"]


def test_baselines_plan_no_more_than_pooled_pipelines(tiny: Path) -> None:
    ours = _json(tiny)["objective"]
    for planner in ("np", "dart-r"):
        assert 0 < _json(tiny, "--planner", planner)["objective"] <= ours * (1 + 1e-9)


def test_a_load_is_carried_at_least_cost(tiny: Path) -> None:
    plan = _json(tiny, "--objective", "gpus", "--load", "north=50", "--load", "south=60")
    served = {model["name"]: model["throughput_rps"] for model in plan["models"]}
    assert served["north"] >= 50
    assert served["south"] >= 60
    assert plan["objective"] < 12


def test_a_table_is_for_people(tiny: Path) -> None:
    result = _run(tiny)
    assert result.exit_code == 0
    assert "north" in result.stdout
    assert "GPUs in use" in result.stdout
    assert "proven by dp" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--load", "north=1"),
        ("--planner", "np", "--objective", "cost", "--load", "north=1"),
        ("--max-partitions", "0"),
        ("--solver", "gurobi"),
    ],
)
def test_bad_usage_exits_with_2(tiny: Path, arguments: tuple[str, ...]) -> None:
    assert _run(tiny, *arguments).exit_code == 2


def test_errors_are_the_platforms_own(tiny: Path) -> None:
    assert isinstance(_run(tiny, instance="set/even/G/none").exception, InvalidInput)
    load = ("--objective", "cost", "--load", "north=a lot")
    assert isinstance(_run(tiny, *load).exception, InvalidInput)
    much = ("--objective", "cost", "--load", "north=1e9", "--load", "south=1")
    error = _run(tiny, *much).exception
    assert isinstance(error, PlanInfeasible)
    assert error.details["constraint"] == "gpus"
