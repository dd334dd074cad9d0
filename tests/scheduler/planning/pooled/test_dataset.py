from __future__ import annotations

import json
from pathlib import Path

import pytest

from catenary_lab.pools.reference import reference_plan
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_services.errors import InvalidInput
from scheduling_cases.tiny_dataset import write_dataset

TINY = "set/even/G/tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data")


def _refused(folder: Path) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load_dataset(folder).problem(TINY)
    return caught.value


def test_an_instance_becomes_a_problem(folder: Path) -> None:
    problem = load_dataset(folder).problem(TINY)
    assert [(gpu.name, gpu.count, gpu.levels) for gpu in problem.classes] == [
        ("fast", 4, (1, 2)),
        ("slow", 8, (1,)),
    ]
    assert problem.classes[0].server_bits_per_second == 6e9
    north, south = problem.models
    assert (north.name, north.weight, south.weight) == ("north", 0.4, 0.6)
    assert north.latency_us["fast", 2].shape == (4, 4)
    assert north.cut_bytes == (0, 200_000, 100_000, 66_666, 0)
    assert north.slo_us - north.margin_us == 24_000
    assert north.batch_build_us_per_row == 1.3e6 / 200.0
    assert problem.max_partitions == 3


def test_the_references_own_limit_of_partitions_is_at_hand(folder: Path) -> None:
    data = load_dataset(folder)
    assert data.problem(TINY, data.instance(TINY).max_partitions).max_partitions == 2


def test_the_high_class_comes_first_wherever_the_file_has_it(folder: Path) -> None:
    path = folder / "clusters.json"
    clusters = json.loads(path.read_text())
    clusters["tiny"]["gpus"] = {"slow": 8, "fast": 4}
    path.write_text(json.dumps(clusters))
    assert [gpu.name for gpu in load_dataset(folder).problem(TINY).classes] == ["fast", "slow"]


def test_a_batch_counts_only_if_every_block_was_measured_with_it(folder: Path) -> None:
    path = folder / "block_timing.csv"
    lines = path.read_text().splitlines()
    lines[1] = ",".join(lines[1].split(",")[:-2]) + ",,"  # north, fast, 1, block 0: two batches
    path.write_text("\n".join(lines))
    north = load_dataset(folder).problem(TINY).models[0]
    assert north.latency_us["fast", 1].shape == (4, 2)


def test_latencies_of_nothing_are_clipped_as_in_the_artifact(folder: Path) -> None:
    path = folder / "block_timing.csv"
    lines = path.read_text().splitlines()
    lines[1] = ",".join([*lines[1].split(",")[:4], "0", "0", "0", "0"])
    path.write_text("\n".join(lines))
    north = load_dataset(folder).problem(TINY).models[0]
    assert north.latency_us["fast", 1][0].tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "name",
    ["models.csv", "block_timing.csv", "cut_bytes.csv", "clusters.json", "instances.json"],
)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in _refused(folder).message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "nowhere" in _refused(tmp_path / "nowhere").message


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("instances.json", "[", "", "not JSON"),
        ("models.csv", "blocks", "pieces", "no column blocks"),
        ("block_timing.csv", "us_b1", "us_1", "no column us_b1"),
        ("block_timing.csv", "north,fast,1,2,", "north,fast,1,1,", "blocks are missing"),
        ("block_timing.csv", "north,fast,1,2,", "north,fast,1,two,", "two"),
        ("cut_bytes.csv", "north,2,", "north,9,", "no cut 9"),
        ("cut_bytes.csv", "north,2,", "north,1,", "lacks cuts of north"),
        ("instances.json", '"cluster": "tiny"', '"cluster": "tinny"', "tinny"),
        ("instances.json", '"dnn": "north"', '"dnn": "polar"', "polar"),
        ("instances.json", '"slo_us"', '"slo"', "slo_us"),
        ("clusters.json", "effective_bandwidth_gbps", "bandwidth", "effective_bandwidth_gbps"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(
    folder: Path, name: str, old: str, new: str, says: str
) -> None:
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert says in _refused(folder).message


def test_an_unknown_instance_is_answered_with_close_ones(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=TINY):
        load_dataset(folder).problem("set/even/G/huge")


def test_without_recorded_plans_only_these_are_missed(folder: Path) -> None:
    data = load_dataset(folder)
    with pytest.raises(InvalidInput, match="no plan"):
        reference_plan(data, TINY)


def test_a_recorded_plan_has_whole_virtual_gpus_and_the_recorded_rates(
    ppipe: PlanningDataset,
) -> None:
    plan = reference_plan(ppipe, "ablation/apcnet/HC2-L")
    parts = [part for line in plan.models[0].pipelines for part in line.partitions]
    assert all(part.gpus == part.vgpus / part.level for part in parts)
    assert 75.0 in [part.gpus for part in parts]  # 74.999995 in the file
    assert plan.models[0].throughput_rps == pytest.approx(2809.546729)
    assert plan.bound == pytest.approx(plan.objective * 1.023263988)
    assert not plan.optimal
