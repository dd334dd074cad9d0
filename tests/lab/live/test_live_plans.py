"""What a live run of plans measures for unlike devices, and what it makes of it; no processes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from catenary_lab.live.plans.by_hand import (
    EVEN,
    WHOLE,
    documents_by_hand,
    even_document,
    plans_by_hand,
    pools_of,
)
from catenary_lab.live.plans.run import DEFAULT, PlanMeasured, PlansMeasured
from catenary_lab.scenarios.figures import judged
from catenary_lab.scenarios.pools.live_plans import report
from catenary_lab.scenarios.pools.schema import FILES, LivePlans
from catenary_lab.scenarios.report import report_of
from catenary_scheduler.planning import DeployedModel
from catenary_scheduler.planning.placement import parse_placement
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli
from cluster_harness import ROOT

SCENARIO = ROOT / "scenarios" / "live-plans.yaml"
POOLS = {"new": ("agent-0",), "old": ("agent-1", "agent-2")}
CUT = "old [0, 1), new [1, 3)"


def scenario() -> LivePlans:
    found = FILES.load(SCENARIO)
    assert isinstance(found, LivePlans)
    return found


def test_agents_are_numbered_class_by_class() -> None:
    assert pools_of({"new": 1, "old": 2}) == POOLS


def test_plans_by_hand_are_whole_models_and_every_cut_in_two_both_ways() -> None:
    found = dict(plans_by_hand(pools_of({"new": 1, "old": 2}), 3))
    assert len(found) == 1 + 2 * 2
    assert [stage.agents for (stage,) in found[WHOLE]] == [("agent-0",), ("agent-1", "agent-2")]
    ((first, second),) = found[CUT]
    assert (first.first_block, first.last_block, first.agents) == (0, 1, ("agent-1", "agent-2"))
    assert (second.first_block, second.last_block, second.agents) == (1, 3, ("agent-0",))
    for pipelines in found.values():
        used = [agent for stages in pipelines for stage in stages for agent in stage.agents]
        assert sorted(used) == ["agent-0", "agent-1", "agent-2"], (
            "no device is idle, none is shared"
        )


def deployed() -> DeployedModel:
    """A model of six blocks."""
    spec = TensorSpec("x", "FP32", (ANY, 4))
    table = BlockTable("0" * 64, True, (Boundary((spec,), 16),) * 7, (1,) * 6)
    return DeployedModel(ModelKey("net", "1"), table, 4_000_000_000, 16, True)


def test_the_even_split_has_a_part_for_each_agent_whatever_its_speed() -> None:
    document = even_document(deployed(), pools_of({"new": 1, "old": 2}))
    (model,) = parse_placement(document).models
    (pipeline,) = model.pipelines
    assert [(stage.first_block, stage.last_block) for stage in pipeline.stages] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]
    assert [stage.agents for stage in pipeline.stages] == [("agent-0",), ("agent-1",), ("agent-2",)]


def test_documents_by_hand_have_the_slo_and_the_batches_of_the_model() -> None:
    found = documents_by_hand(deployed(), pools_of({"new": 1, "old": 2}))
    assert len(found) == 1 + 2 * 5
    (model,) = parse_placement(found[WHOLE]).models
    assert model.slo_ns == deployed().slo_ns
    assert [pipeline.batch_size for pipeline in model.pipelines] == [16, 16]


def window(name: str, answers: int, late: int = 0) -> PlanMeasured:
    return PlanMeasured(name, 10.0, answers, late, 0, 200.0, {"L4": 0.9, "P4": 0.8}, 0.5)


def test_a_report_sets_the_default_beside_the_even_split_and_the_best_by_hand() -> None:
    measured = PlansMeasured(
        (window(DEFAULT, 400), window(WHOLE, 390), window(CUT, 100)),
        (
            window(EVEN, 300),
            window(CUT, 350, late=2),
            window(WHOLE, 500),
            window(DEFAULT, 490),
            window(CUT, 350),
            window(WHOLE, 510),
            window(DEFAULT, 500),
        ),
        "why",
        6,
        100.0,
    )
    found = report(scenario(), measured)
    plans = found.facts["plans"]
    assert [(each["plan"], each["answers_per_s"]) for each in plans] == [
        (DEFAULT, pytest.approx(49.5)),
        (EVEN, pytest.approx(30.0)),
        (WHOLE, pytest.approx(50.5)),
        (CUT, pytest.approx(35.0)),
    ]
    assert [each["late"] for each in plans] == [0, 0, 0, 2]
    over, even = judged(scenario().expect, found.tables, found.facts)
    assert over["value"] == pytest.approx(49.5 / 50.5)
    assert over["ok"]
    assert even["value"] == pytest.approx(49.5 / 30.0)
    text = report_of("live-plans", scenario(), found).text()
    assert "| default | default | 49.5 | 98.0 % |" in text
    assert "The 2 plans by hand" in text


def test_plans_of_one_class_of_devices_are_no_scenario() -> None:
    with pytest.raises(InvalidInput, match="gpus"):
        FILES.parse({**scenario().model_dump(exclude={"expect", "quick"}), "gpus": {"L4": 3}})


def test_plans_are_measured_on_real_processes_only() -> None:
    ran = CliRunner().invoke(cli, ["simulate", "pools", str(SCENARIO), "--json"])
    assert ran.exit_code != 0
    assert "--live" in str(ran.exception or ran.output)
