"""`catenaryd simulate placement`: scenario files in, tables, facts and plots out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from catenary_lab.scenarios.placement.schema import FILES
from catenary_lab.scenarios.placement.settings import rows_of
from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli
from cluster_harness import ROOT

SCENARIOS = sorted((ROOT / "scenarios" / "placement").glob("*.yaml"))
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


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", "placement", *arguments])


def file_of(folder: Path, kind: str, **changes: Any) -> Path:
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump({"kind": kind, **BASE, **OF_KIND[kind], **changes}))
    return path


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_kind_prints_tables_and_one_json_object(tmp_path: Path, kind: str) -> None:
    path = str(file_of(tmp_path, kind))
    text = run(path, "--workers", "1")
    assert text.exit_code == 0, text.output
    assert "# small" in text.output
    facts = json.loads(run(path, "--workers", "1", "--json").output)
    assert facts["scenario"] == kind
    for fact in facts["policies"]:
        assert fact.keys() >= {"policy", "workers", "attainment", "ttft_p99_ms", "atgt_p99_ms"}


def test_what_was_found_is_the_smallest_that_reaches_the_target(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, "fewest"))
    facts = json.loads(run(path, "--workers", "1", "--json").output)
    assert {fact["engine"] for fact in facts["policies"]} == {"whole", "chunked"}
    assert all(fact["attainment"] >= 0.9 for fact in facts["policies"])
    assert {saving["beside"] for saving in facts["savings"]} == {"jsq", "default"}


def test_a_target_out_of_reach_is_said_to_be(tmp_path: Path) -> None:
    slow = {"ttft_ms": 600, "atgt_ms": 20}
    path = str(file_of(tmp_path, "fewest", objectives=slow, most_workers=2))
    facts = json.loads(run(path, "--workers", "1", "--json").output)
    assert not any(fact["reached"] for fact in facts["policies"])
    assert "> 2 | > 2 | > 4" in run(path, "--workers", "1").output


def test_equal_files_give_equal_facts(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, "attainment"))
    first, second = (run(path, "--workers", "1", "--json") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output == second.output


def test_plots_and_records_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(str(file_of(tmp_path, "attainment")), "--out", str(out), "--workers", "1")
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in out.iterdir()) == [
        "attainment.json",
        "attainment.png",
    ]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_project_is_valid_in_both_forms(path: Path) -> None:
    assert FILES.load(path).title
    assert FILES.load(path, quick=True).kind == FILES.load(path).kind


def test_the_figures_of_the_paper_are_all_there() -> None:
    assert {FILES.load(path).figure for path in SCENARIOS} >= {"9", "10", "11", "12", "13"}


def test_out_of_sample_are_twelve_cells_of_fresh_seeds() -> None:
    for model in ("13b", "70b"):
        scenario = FILES.load(ROOT / "scenarios" / "placement" / f"out-of-sample-{model}.yaml")
        assert len(scenario.rates_per_s) * len(scenario.seeds) == 12
        assert scenario.seeds == [201, 202, 203, 204]


def test_the_schema_is_printed_and_knows_every_kind() -> None:
    schema = json.loads(run("--schema").output)
    assert schema == FILES.json_schema()
    assert set(schema["discriminator"]["mapping"]) == set(FILES.kinds)
    for name in schema["discriminator"]["mapping"].values():
        assert schema["$defs"][name.rpartition("/")[2]]["additionalProperties"] is False


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
        FILES.parse({"kind": "attainment", **BASE, **OF_KIND["attainment"], **changes})


def test_data_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_DATA", str(tmp_path))
    done = run(str(file_of(tmp_path, "attainment", lengths={"file": "llm/none.csv"})))
    assert done.exit_code == 1
    assert "llm/none.csv" in str(done.exception)
    assert "CATENARY_DATA" in str(done.exception)


def test_recorded_lengths_are_halved() -> None:
    path = ROOT / "scenarios" / "placement" / "out-of-sample-13b.yaml"
    case = rows_of(FILES.load(path, quick=True))[0].case
    learned, served = case.halves
    assert abs(len(learned.prompts) - len(served.prompts)) <= 1
    assert set(case.workload().prompts) <= set(served.prompts)


def test_nothing_to_run_is_bad_usage() -> None:
    assert run().exit_code == 2
