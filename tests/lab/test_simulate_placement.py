"""`catenaryd simulate placement`: scenario files in, tables, facts and plots out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catenary_lab.scenarios.placement.schema import FILES
from catenary_lab.scenarios.placement.settings import rows_of
from catenary_services.errors import InvalidInput
from cluster_harness import ROOT
from shared_helpers.scenario_command import ScenarioCommand

WORKER = {
    "prefill_token_ms": 0.12,
    "prefill_ms": 14,
    "decode_context_token_ms": 0.00045,
    "decode_session_ms": 0.075,
    "decode_ms": 22.5,
    "decode_lone_ms": 23,
    "gpu_memory_gb": 80,
    "weights_gb": 26,
    "token_bytes": 819200,
}
BASE: dict[str, Any] = {
    "title": "small",
    "workers": {"one": WORKER, "big": {**WORKER, "gpus": 2}},
    "objectives": {"ttft_ms": 600, "atgt_ms": 30},
    "lengths": {
        "prompt": {"median": 60, "sigma": 1},
        "answer": {"median": 50, "sigma": 0.5},
        "count": 400,
    },
    "rates_per_s": [2, 6],
    "duration_s": 4,
    "policies": [
        {"label": "slo", "policy": "slo", "workers": "one"},
        {"label": "jsq", "policy": "jsq", "workers": "one"},
        {"label": "default", "policy": "jsq", "workers": "big"},
    ],
}
OF_KIND: dict[str, dict[str, Any]] = {
    "fewest": {
        "target": 0.9,
        "engines": [{"label": "whole"}, {"label": "chunked", "chunk_tokens": 256}],
        "expected": {"2": {"jsq": "1 / 2"}},
    },
    "attainment": {"gpus": 2},
    "demand": {"most_workers": 5},
    "overhead": {"workers_per_rps": 1},
    "scaling": {
        "rates_per_s": [6],
        "steps": [0.5, 1.0],
        "workers_per_rps": 0.3,
        "clusters": [
            {"label": "fixed", "scaling": "fixed"},
            {"label": "scaled", "scaling": "scaled", "cold_start_s": 1},
        ],
    },
}
COMMAND = ScenarioCommand("placement", BASE, OF_KIND)


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_kind_prints_tables_and_one_json_object(tmp_path: Path, kind: str) -> None:
    path = COMMAND.file(tmp_path, kind)
    assert "# small" in COMMAND.text(path)
    facts = COMMAND.facts(path)
    assert facts["scenario"] == kind
    for fact in facts["policies"]:
        assert fact.keys() >= {"policy", "workers", "attainment", "ttft_p99_ms", "atgt_p99_ms"}


def test_what_was_found_is_the_smallest_that_reaches_the_target(tmp_path: Path) -> None:
    facts = COMMAND.facts(COMMAND.file(tmp_path, "fewest"))
    assert {fact["engine"] for fact in facts["policies"]} == {"whole", "chunked"}
    assert all(fact["attainment"] >= 0.9 for fact in facts["policies"])
    assert {saving["beside"] for saving in facts["savings"]} == {"jsq", "default"}


def test_a_target_out_of_reach_is_said_to_be(tmp_path: Path) -> None:
    slow = {"ttft_ms": 600, "atgt_ms": 20}
    path = COMMAND.file(tmp_path, "fewest", objectives=slow, most_workers=2)
    assert not any(fact["reached"] for fact in COMMAND.facts(path)["policies"])
    assert "> 2 | > 2 | > 4" in COMMAND.text(path)


def test_equal_files_give_equal_facts(tmp_path: Path) -> None:
    path = COMMAND.file(tmp_path, "attainment")
    assert COMMAND.facts(path) == COMMAND.facts(path)


def test_plots_and_records_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = COMMAND.run(
        str(COMMAND.file(tmp_path, "attainment")), "--out", str(out), "--workers", "1"
    )
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in out.iterdir()) == [
        "attainment.json",
        "attainment.png",
    ]


def test_out_of_sample_are_twelve_cells_of_fresh_seeds() -> None:
    for model in ("13b", "70b"):
        scenario = FILES.load(ROOT / "scenarios" / "placement" / f"out-of-sample-{model}.yaml")
        assert len(scenario.rates_per_s) * len(scenario.seeds) == 12
        assert scenario.seeds == [201, 202, 203, 204]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "none"}, "scenario.kind"),
        ({"rates_per_s": []}, "rates_per_s"),
        ({"unknown": 1}, "unknown"),
        ({"policies": [{"label": "a", "policy": "slo", "workers": "none"}]}, "none"),
        ({"policies": [BASE["policies"][0], BASE["policies"][0]]}, "same label"),
        ({"workers": {"one": {**WORKER, "weights_gb": 90}}}, "no memory"),
        ({"lengths": {"prompt": {"median": 5, "sigma": 1}}}, "either a file"),
    ],
)
def test_a_wrong_key_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        FILES.parse(COMMAND.document("attainment") | changes)


def test_data_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_DATA", str(tmp_path))
    done = COMMAND.run(str(COMMAND.file(tmp_path, "attainment", lengths={"file": "llm/none.csv"})))
    assert done.exit_code == 1
    assert "llm/none.csv" in str(done.exception)
    assert "CATENARY_DATA" in str(done.exception)


def test_recorded_lengths_are_halved() -> None:
    path = ROOT / "scenarios" / "placement" / "out-of-sample-13b.yaml"
    case = rows_of(FILES.load(path, quick=True))[0].case
    learned, served = case.halves
    assert abs(len(learned.prompts) - len(served.prompts)) <= 1
    assert set(case.workload().prompts) <= set(served.prompts)
