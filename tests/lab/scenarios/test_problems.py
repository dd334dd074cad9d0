"""Planning tasks made from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_lab.pools.problems import (
    known_models,
    of_classes,
    only,
    single_model,
    with_batch_building,
    with_gpus,
)
from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from catenary_services.errors import InvalidInput
from scheduling_cases.tiny_dataset import SLO_US

INSTANCE = "set/even/G/tiny"


@pytest.fixture
def dataset(tiny: Path) -> PlanningDataset:
    return load_dataset(tiny)


def test_a_smaller_cluster_keeps_classes_in_order(dataset: PlanningDataset) -> None:
    problem = with_gpus(dataset.problem(INSTANCE), {"slow": 3, "fast": 1}, levels=(1,))
    assert [(each.name, each.count, each.levels) for each in problem.classes] == [
        ("fast", 1, (1,)),
        ("slow", 3, (1,)),
    ]
    only_slow = with_gpus(problem, {"slow": 2})
    assert [each.name for each in only_slow.classes] == ["slow"]
    with pytest.raises(InvalidInput, match="the cluster has no huge"):
        with_gpus(problem, {"huge": 1})


def test_a_model_alone_has_all_the_weight(dataset: PlanningDataset) -> None:
    problem = dataset.problem(INSTANCE)
    assert [(each.name, each.weight) for each in only(problem, ["south"]).models] == [("south", 1)]
    assert only(problem, ["north", "south"]).models == problem.models


def test_slo_and_margin_follow_their_scales(dataset: PlanningDataset) -> None:
    problem = single_model(dataset, "tiny", "north", slo_scale=10.0, margin=0.2)
    (model,) = problem.models
    assert (model.slo_us, model.margin_us) == (2 * SLO_US, pytest.approx(0.4 * SLO_US))
    assert model.batch_build_us_per_row == 0
    assert set(known_models(dataset)) == {"north", "south"}
    with pytest.raises(InvalidInput, match="no instance of the data set is on 'huge'"):
        single_model(dataset, "huge", "north", slo_scale=5.0, margin=0.4)


def test_batch_building_follows_the_rate(dataset: PlanningDataset) -> None:
    problem = with_batch_building(dataset.problem(INSTANCE), {"north": 130.0, "south": 0.0})
    assert [each.batch_build_us_per_row for each in problem.models] == [1e4, 0.0]


@pytest.mark.parametrize(
    ("names", "gpus", "counts"),
    [(["fast", "slow"], 100, [25, 75]), (["slow"], 7, [7]), (["fast", "slow"], 10, [2, 8])],
)
def test_gpus_are_split_over_classes(
    dataset: PlanningDataset, names: list[str], gpus: int, counts: list[int]
) -> None:
    problem = of_classes(dataset.problem(INSTANCE), names, gpus, 0.25, 6.0)
    assert [each.count for each in problem.classes] == counts
    assert sum(counts) == gpus
    assert problem.classes[0].server_bits_per_second == 6e9


def test_a_class_without_profile_is_named(dataset: PlanningDataset) -> None:
    with pytest.raises(InvalidInput, match="north has no profile on huge"):
        of_classes(dataset.problem(INSTANCE), ["huge"], 10, 0.25, 6.0)
