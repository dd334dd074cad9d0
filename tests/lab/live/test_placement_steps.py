"""What a live run of placement makes of its scenario and of what was measured; no processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from catenary_lab.live.placement.load import Answered
from catenary_lab.live.placement.steps import (
    AgentsAt,
    StepsMeasured,
    changes,
    drawn,
)
from catenary_lab.scenarios.placement.live_schema import LiveSteps, StepSpec
from catenary_lab.scenarios.placement.live_steps import report
from catenary_lab.scenarios.placement.schema import FILES
from catenary_lab.scenarios.placement.schema_parts import DrawnLengths
from catenary_lab.scenarios.report import report_of
from catenary_scheduler.scaling.workers.workers_line import WorkerCapability
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenaryd.command_line import cli
from cluster_harness import ROOT

SCENARIO = ROOT / "scenarios" / "placement" / "live-steps.yaml"
RUN = LiveSteps(
    kind="live",
    title="steps",
    model="m",
    most_agents=2,
    prompt=DrawnLengths(median=40, sigma=0.5),
    answer=DrawnLengths(median=30, sigma=0.5),
    session_tokens=128,
    max_batch=4,
    per_token_factor=2.0,
    first_token_factor=1.0,
    theta=0.8,
    steps=[
        StepSpec(load=0.5, seconds=100.0),
        StepSpec(load=0.0, seconds=50.0),
        StepSpec(load=2.0, seconds=100.0),
    ],
    settle_s=1.0,
    seed=3,
    scheduler={},
)


def test_requests_come_at_the_rate_of_their_step_and_fit_in_a_session() -> None:
    requests = drawn(RUN, rate_per_s=4.0)
    assert requests == drawn(RUN, rate_per_s=4.0)
    assert requests != drawn(RUN.model_copy(update={"seed": 4}), rate_per_s=4.0)
    first = [each for each in requests if each.step == 0]
    last = [each for each in requests if each.step == 2]
    assert len(first) + len(last) == len(requests)
    assert len(first) == pytest.approx(200, rel=0.25)
    assert len(last) == pytest.approx(800, rel=0.15)
    assert all(0 <= each.due_s < 100 for each in first)
    assert all(150 <= each.due_s < 250 for each in last)
    assert [each.due_s for each in requests] == sorted(each.due_s for each in requests)
    for each in requests:
        assert 4 <= each.prompt_tokens <= 64
        assert 4 <= each.answer_tokens <= 64


def test_agents_that_came_and_went_are_counted() -> None:
    seen = [AgentsAt(float(at), 1, count) for at, count in enumerate((1, 2, 2, 3, 1, 2, 1))]
    assert changes(seen) == (3, 3)
    assert changes(seen[:1]) == (0, 0)


def measured(*requests: Answered) -> StepsMeasured:
    lines = LatencyLines(1e6, 1e6, 1e4, 1e6, 1e7)
    agents = (AgentsAt(0.0, 1, 1), AgentsAt(30.0, 2, 2), AgentsAt(90.0, 1, 2), AgentsAt(95.0, 1, 1))
    return StepsMeasured(
        lines,
        lines,
        TokenObjectives(500_000_000, 40_000_000),
        WorkerCapability(2.0, 3.0),
        requests,
        agents,
        0.001,
        100.0,
    )


def test_a_report_compares_what_was_predicted_with_what_was_measured() -> None:
    scenario = FILES.load(SCENARIO)
    assert isinstance(scenario, LiveSteps)
    good = Answered(0, 1.0, "", 220.0, 30.0, 200.0, 24.0, True, True)
    slow = Answered(1, 30.0, "", 480.0, 50.0, 400.0, 50.0, True, False)
    lost = Answered(1, 31.0, "PARTITION_LOST: gone")
    found = report(scenario, measured(good, slow, lost))
    facts = found.facts["live"]
    assert (facts["requests"], facts["lost"], facts["problems"]) == (3, 1, ["PARTITION_LOST: gone"])
    assert facts["attainment"] == pytest.approx(1 / 3), "who got nothing got nothing in time"
    assert facts["ttft_ratio"]["p50"] == pytest.approx((1.1 + 1.2) / 2)
    assert facts["atgt_ratio"]["p90"] == pytest.approx(1.0 + 0.9 * 0.25)
    assert [step["requests"] for step in facts["steps"]] == [1, 2, *[0] * (len(scenario.steps) - 2)]
    assert facts["steps"][-1]["attainment"] is None
    assert (facts["scale_outs"], facts["scale_ins"]) == (1, 1)
    assert (facts["agents_peak"], facts["agents_last"]) == (2, 1)
    assert facts["objectives"] == {"ttft_ms": 500.0, "atgt_ms": 40.0}
    text = report_of("live-steps", scenario, found).text()
    assert "Agents started: 1, stopped: 1" in text
    assert "Measured over predicted" in text


def test_a_live_scenario_starts_no_process_unasked(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli, ["simulate", "placement", str(SCENARIO), "--json"])
    assert ran.exit_code != 0
    assert "--live" in str(ran.exception or ran.output)
