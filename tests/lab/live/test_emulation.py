"""What the processes of a live scenario are given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.executors.device import Device
from catenary_agent.executors.emulated import EmulatedPart
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_lab.live.dilation import dilate_plan, dilate_problem
from catenary_lab.live.emulation import agent_settings, plan_document, write_models, write_profiles
from catenary_lab.live.load import ModelOutcome, infer_all
from catenary_scheduler.planning.placement import parse_placement
from catenary_scheduler.planning.pooled.layout.layout import lay_out
from catenary_scheduler.planning.pooled.problem import (
    GpuClass,
    PooledModel,
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import Unavailable
from catenary_services.models.model_repository import ModelRepository

FAST = np.array([[1000.0, 1500.0], [2000.0, 2600.0]])
PROBLEM = PoolingProblem(
    (GpuClass("fast", 2, (1,), 1, 8e9), GpuClass("slow", 3, (1,), 1, 8e9)),
    (
        PooledModel(
            "net",
            2,
            {("fast", 1): FAST, ("slow", 1): 3 * FAST},
            (0, 400_001, 0),
            30_000.0,
            12_000.0,
            1.0,
            100.0,
        ),
    ),
)
PLAN = PooledPlan(
    300.0,
    310.0,
    False,
    "test",
    0.1,
    (
        PooledModelPlan(
            "net",
            300.0,
            (
                PooledPipeline(
                    2,
                    300.0,
                    17_000.0,
                    (
                        PooledPartition("slow", 1, 0, 1, 3, 3),
                        PooledPartition("fast", 1, 1, 2, 2, 2),
                    ),
                ),
            ),
        ),
    ),
)


def test_dilation_makes_every_time_longer_and_every_rate_smaller() -> None:
    problem, plan = dilate_problem(PROBLEM, 4), dilate_plan(PLAN, 4)
    model = problem.models[0]
    assert model.latency_us["fast", 1].tolist() == (4 * FAST).tolist()
    assert (model.slo_us, model.margin_us, model.batch_build_us_per_row) == (120e3, 48e3, 400.0)
    assert [each.server_bits_per_second for each in problem.classes] == [2e9, 2e9]
    assert (plan.objective, plan.bound) == (75.0, 77.5)
    assert plan.models[0].throughput_rps == 75.0
    assert plan.models[0].pipelines[0].latency_us == 68_000.0
    assert model.cut_bytes == PROBLEM.models[0].cut_bytes
    assert model.weight == 1.0


def test_an_emulated_model_has_cuts_of_the_profiles_size(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    write_models(repository, PROBLEM)
    key = ModelKey("net", "1")
    table, manifest = repository.block_table(key), repository.manifest(key)
    assert table.blocks == 2
    assert table.batched
    # An odd number of bytes is rounded up to whole float16 numbers.
    assert [boundary.row_bytes for boundary in table.boundaries] == [64, 400_002, 64]
    assert table.boundaries[1].wire_row_bytes(float16=True) == 400_002
    assert manifest.slo_ns == 30_000_000
    assert manifest.max_batch == 2


def test_an_emulated_device_takes_the_profiles_time(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "models")
    write_models(repository, PROBLEM)
    files = write_profiles(tmp_path / "profiles", PROBLEM)
    assert set(files) == {("fast", 1), ("slow", 1)}
    key = PartitionKey(ModelKey("net", "1"), 0, 2)
    device = Device.parse("emulated:slow", profile=files["slow", 1])
    ends = PartitionSignature.of(repository, key, True)
    part = EmulatedPart(ends, repository.block_table(key.model), device)
    assert [part.compute_ns(rows) for rows in (1, 2)] == [9_000_000, 12_300_000]


def test_the_plan_reads_back_as_a_placement() -> None:
    agents, plan = lay_out(PROBLEM, PLAN)
    document = json.loads(json.dumps(plan_document(plan)))
    model = parse_placement(document).models[0]
    assert model.slo_ns == 30_000_000
    stages = model.pipelines[0].stages
    assert model.pipelines[0].batch_size == 2
    assert [(stage.first_block, stage.last_block) for stage in stages] == [(0, 1), (1, 2)]
    assert {agent for stage in stages for agent in stage.agents} == {a.agent_id for a in agents}


def test_every_agent_gets_its_class_server_link_and_profile() -> None:
    agents, _ = lay_out(PROBLEM, PLAN)
    profiles = {("fast", 1): Path("f.json"), ("slow", 1): Path("s.json")}
    settings = agent_settings(agents, profiles)
    assert len(settings) == 5
    assert len({each["server_id"] for each in settings}) == 5
    for agent, each in zip(agents, settings, strict=True):
        assert each["agent_id"] == agent.agent_id
        assert each["device"] == f"emulated:{agent.device_class}"
        assert each["emulated_profile"] == profiles[agent.device_class, 1]
        assert each["link_bytes_per_second"] == 1_000_000_000
        assert each["emulated_link"] is True


def test_late_and_refused_requests_count_against_attainment() -> None:
    outcome = ModelOutcome(10, 7, 1, {"SLO_UNATTAINABLE": 2}, tuple(map(float, range(8))))
    assert outcome.attainment == 0.7
    assert outcome.percentile_ms(50) == 3.5
    assert ModelOutcome(0, 0, 0, {}, ()).attainment == 1.0
    assert ModelOutcome(0, 0, 0, {}, ()).percentile_ms(99) is None


async def test_a_generator_that_reaches_nobody_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="the load generator failed"):
        await infer_all("127.0.0.1:1", {"net": [0.0, 0.1]}, {"net": 50.0}, 0.0, tmp_path)
