"""`catenaryd plan dataset`: profiles and a cluster as a task that the planner and simulator read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from catenary_scheduler.planning.pooled.dataset import load_dataset
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.profile import DeviceProfile, ModelProfile, tensors_at_cuts
from catenary_services.domain.tensors import TensorSpec
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenaryd.command_line import cli

BATCHES = (1, 2, 4)
NEW_US, OLD_US = 1000, 2500


def _device(name: str, level: int, block_us: int, *, estimated: bool) -> DeviceProfile:
    rows = tuple(
        tuple(1000 * block_us * level * (block + 1) * batch // 2 for batch in BATCHES)
        for block in range(3)
    )
    return DeviceProfile(name, level, estimated, "a test", BATCHES, rows, rows)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two models of three blocks; "small" is served in batches of two at most."""
    root = tmp_path / "models"
    repository = ModelRepository(root)
    specs = [TensorSpec(name, "FP32", (-1, 4)) for name in ("x", "a", "b", "y")]
    table = BlockTable("abc", True, tuple(Boundary((s,), 16) for s in specs), (1, 1, 1))
    for name, batch in (("big", 4), ("small", 2)):
        key = ModelKey(name, "1")
        manifest = ModelManifest(key, "onnxruntime_onnx", "model.onnx", 50_000_000, batch, True)
        repository.write_manifest(manifest)
        repository.write_block_table(key, table)
        devices = (
            _device("new", 1, NEW_US, estimated=False),
            _device("new", 2, NEW_US, estimated=False),
            _device("old", 1, OLD_US, estimated=True),
        )
        repository.write_profile(
            key,
            ModelProfile(
                key, "abc", 3, (0, 800, 400, 0), (9, 9, 9), devices, tensors_at_cuts(table)
            ),
        )
    return root


def _write(models: Path, *arguments: str) -> Result:
    common = ["plan", "dataset", str(models.parent / "task"), "--model-repository", str(models)]
    return CliRunner().invoke(cli, [*common, *arguments])


BOTH = ("--model", "big=3", "--model", "small=1", "--gpus", "new=2", "--gpus", "old=3")


def test_the_planner_reads_what_was_written(models: Path) -> None:
    result = _write(models, *BOTH, "--gigabits", "8", "--margin", "0.25")
    assert result.exit_code == 0, result.exception
    problem = load_dataset(models.parent / "task").problem("cluster")
    assert [(c.name, c.count, c.levels) for c in problem.classes] == [
        ("new", 2, (1, 2)),
        ("old", 3, (1,)),
    ]
    assert {c.server_bits_per_second for c in problem.classes} == {8e9}
    big, small = problem.models
    assert (big.weight, small.weight) == (0.75, 0.25)
    assert (big.slo_us, big.margin_us) == (50_000, 12_500)
    assert big.cut_bytes == (0, 800, 400, 0)
    # Batch 3 was not measured: half way between 2 and 4.
    assert big.latency_us["new", 1][0].tolist() == [500, 1000, 1500, 2000]
    assert big.latency_us["old", 1][2].tolist() == [3750, 7500, 11_250, 15_000]
    assert small.latency_us["new", 2].shape == (3, 2)


def test_a_deadline_may_be_tried_that_no_model_yaml_says(models: Path) -> None:
    _write(models, *BOTH, "--slo-ms", "20")
    problem = load_dataset(models.parent / "task").problem("cluster")
    assert [model.slo_us for model in problem.models] == [20_000, 20_000]


def test_it_is_planned_and_simulated_like_any_data_set(models: Path) -> None:
    assert _write(models, *BOTH).exit_code == 0
    task = ["--dataset", str(models.parent / "task"), "--instance", "cluster", "--json"]
    planned = CliRunner().invoke(cli, ["plan", "pools", *task])
    assert {m["name"] for m in json.loads(planned.stdout)["models"]} == {"big", "small"}
    served = CliRunner().invoke(
        cli, ["simulate", "pools", *task, "--base-rps", "own", "--load", "0.5", "--duration", "1"]
    )
    assert served.exit_code == 0, served.exception


def test_estimates_are_named_and_measurements_are_not(models: Path) -> None:
    assert "times of old are estimates" in _write(models, *BOTH).stdout
    assert "are estimates" not in _write(models, "--model", "big", "--gpus", "new=2").stdout


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        (("--model", "big", "--gpus", "none=1"), "gpus", "profile of big has no times of 'none'"),
        (("--model", "big", "--gpus", "new=0"), "gpus", "new=0 is not CLASS=COUNT"),
        (("--model", "big", "--gpus", "new"), "gpus", "is not CLASS=COUNT"),
        (("--model", "big=-1", "--gpus", "new=1"), "model", "is not a share"),
        (("--model", "big=inf", "--gpus", "new=1"), "model", "is not a share"),
    ],
)
def test_what_makes_no_task_is_refused_by_name(
    models: Path, arguments: tuple[str, ...], field: str, message: str
) -> None:
    error = _write(models, *arguments).exception
    assert isinstance(error, InvalidInput)
    assert error.field == field
    assert message in error.message


def test_a_model_without_a_profile_is_refused(models: Path) -> None:
    (models / "big" / "1" / "profile.json").unlink()
    error = _write(models, "--model", "big", "--gpus", "new=1").exception
    assert isinstance(error, InvalidInput)
    assert "catenaryd profile" in error.message
