"""`catenaryd simulate packing`: scenario files in, tables, verdicts, facts and plots out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catenary_lab.scenarios.packing.schema import FILES, Targets
from catenary_lab.scenarios.packing.settings import rows_of
from catenary_services.errors import InvalidInput
from cluster_harness import ROOT
from shared_helpers.scenario_command import ScenarioCommand

FIGURES = {
    "gpus_mean",
    "gpus_peak",
    "utilisation",
    "migrations_per_s",
    "migrated_bytes_per_s",
    "preemptions_per_s",
    "lower_bound_gpus",
}
WORKLOAD = {"label": "few", "rate_per_s": 2, "prompt": {"mean": 80}, "answer": {"mean": 200}}
BASE: dict[str, Any] = {
    "title": "small",
    "gpus": {"one": {"cache_tokens": 1600, "token_bytes": 1000}},
    "workloads": [WORKLOAD],
    "policies": [
        {"label": "ours", "policy": "mell-batched"},
        {"label": "worst fit", "policy": "worst-fit"},
        {"label": "load balancing", "policy": "load-balancing"},
    ],
    "warm_up_s": 5,
    "duration_s": 20,
}
MACHINE = {"gpus": 2, "bus_gb_per_s": 1e-3, "link_gb_per_s": 1e-4, "prefill_tokens_per_s": 50}
LIMIT = {"measure": "gpus_mean", "workloads": ["few"], "beside": "worst fit", "at_most": 10}
OF_KIND: dict[str, dict[str, Any]] = {
    "fleet": {
        "gpus": {"one": {**BASE["gpus"]["one"], "machine": MACHINE}},
        "measures": ["gpus_mean", "transfers", "decisions"],
        "expected": {"gpus_mean": {"one, few": {"worst fit": "about 5"}}},
    },
    "over_time": {"workloads": [{**WORKLOAD, "steps": [{"factor": 2, "seconds": 25}]}]},
    "serving": {"most_gpus": {"one": 2}, "patience_s": 3},
    "targets": {
        "policy": "ours",
        "limits": [LIMIT, {**LIMIT, "measure": "migrations_per_s", "at_most": 1}],
    },
}
COMMAND = ScenarioCommand("packing", BASE, OF_KIND)


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_kind_prints_tables_and_one_json_object(tmp_path: Path, kind: str) -> None:
    path = COMMAND.file(tmp_path, kind)
    assert "# small" in COMMAND.text(path)
    facts = COMMAND.facts(path)
    assert facts["scenario"] == kind
    assert [each["policy"] for each in facts["policies"]] == [
        each["label"] for each in BASE["policies"]
    ]
    for fact in facts["policies"]:
        assert fact.keys() >= FIGURES
        assert fact["violations"] == 0


def test_reference_values_stand_below_the_row_they_are_of(tmp_path: Path) -> None:
    text = COMMAND.text(COMMAND.file(tmp_path, "fleet"))
    assert "| - reference | - | about 5 | - | - |" in text


def test_shares_of_transfers_are_given_for_who_moves(tmp_path: Path) -> None:
    facts = COMMAND.facts(COMMAND.file(tmp_path, "fleet"))
    moved = next(each for each in facts["policies"] if each["policy"] == "ours")["transfers"]
    assert moved["kv"] + moved["tokens"] + moved["dropped"] > 0


def test_a_verdict_is_given_on_every_target(tmp_path: Path) -> None:
    facts = COMMAND.facts(COMMAND.file(tmp_path, "targets"))
    assert facts["met"] is False
    kept, missed = facts["targets"]
    assert (kept["measure"], kept["beside"], kept["met"]) == ("gpus_mean", "worst fit", True)
    assert kept["ratio"] == pytest.approx(kept["ours"] / kept["theirs"])
    # Worst fit does not migrate: nobody who does is within any share of that.
    assert (missed["theirs"], missed["ratio"], missed["met"]) == (0, None, False)
    text = COMMAND.text(COMMAND.file(tmp_path, "targets"))
    assert "1 of 2 targets are met" in text
    assert "FAIL" in text


def test_active_gpus_are_given_epoch_by_epoch(tmp_path: Path) -> None:
    facts = COMMAND.facts(COMMAND.file(tmp_path, "over_time"))
    assert [len(each["gpus"]) for each in facts["over_time"]] == [25, 25, 25]
    assert max(max(each["gpus"]) for each in facts["over_time"]) > 1


def test_a_cluster_of_fixed_size_is_never_exceeded(tmp_path: Path) -> None:
    for fact in COMMAND.facts(COMMAND.file(tmp_path, "serving"))["policies"]:
        assert fact["gpus_peak"] <= 2
        assert 0 <= fact["undisturbed"] <= 1


def test_seeds_decide_and_equal_files_give_equal_facts(tmp_path: Path) -> None:
    path = COMMAND.file(tmp_path, "serving", seeds=[1, 2])
    facts = COMMAND.facts(path)
    assert facts == COMMAND.facts(path)
    first, second = (
        {each["policy"]: each["arrived"] for each in facts["policies"] if each["seed"] == seed}
        for seed in (1, 2)
    )
    assert first != second


def test_plots_and_records_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = COMMAND.run(
        str(COMMAND.file(tmp_path, "over_time")), "--out", str(out), "--workers", "1"
    )
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in out.iterdir()) == [
        "over_time.json",
        "over_time.png",
    ]


def test_targets_are_those_of_the_project_in_and_out_of_sample() -> None:
    limits = []
    for name in ("packing-targets", "packing-out-of-sample"):
        scenario = FILES.load(ROOT / "scenarios" / "packing" / f"{name}.yaml")
        assert isinstance(scenario, Targets)
        limits.append(scenario.limits)
        assert scenario.policy == "pack"
    assert limits[0] == limits[1]
    found = {
        (each.measure, each.beside): each.at_most for each in limits[0] if len(each.workloads) > 1
    }
    assert found == {
        ("gpus_mean", "worst fit"): 0.91,
        ("gpus_mean", "load balancing"): 0.94,
        ("migrations_per_s", "load balancing"): 1.5,
    }


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("none", {}, "scenario.kind"),
        ("fleet", {"seeds": []}, "scenario.seeds"),
        ("fleet", {"unknown": 1}, "scenario.unknown"),
        ("fleet", {"measures": ["beauty"]}, "scenario.measures.0"),
        (
            "fleet",
            {"gpus": {"one": {"cache_tokens": 3, "token_bytes": 1}}},
            "gpus.one.cache_tokens",
        ),
        ("fleet", {"policies": [BASE["policies"][0]] * 2}, "policies: two have the same label"),
        ("fleet", {"workloads": [WORKLOAD, WORKLOAD]}, "workloads: two have the same label"),
        ("fleet", {"workloads": [{"label": "none"}]}, "workloads.0.*either a trace"),
        (
            "fleet",
            {"workloads": [{**WORKLOAD, "trace": {"file": "any"}}]},
            "workloads.0.*its own lengths",
        ),
        (
            "fleet",
            {"policies": [{"label": "ours", "policy": "pack", "reserve": True}]},
            "policies.0.*reserve",
        ),
        ("serving", {"most_gpus": {"other": 1}}, "most_gpus"),
        ("targets", {"policy": "theirs"}, "policies: none is called 'theirs'"),
        ("targets", {"limits": [{**LIMIT, "beside": "best"}]}, "none is called 'best'"),
        ("targets", {"limits": [{**LIMIT, "workloads": ["many"]}]}, "none is called 'many'"),
    ],
)
def test_a_wrong_key_is_named(kind: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        FILES.parse(COMMAND.document(kind, **changes))


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        ({"label": "few", "trace": {"file": "llm/none.csv"}}, "workloads.0.trace.file"),
        ({**WORKLOAD, "arrivals": "gamma:x"}, "workloads.0.arrivals"),
    ],
)
def test_what_cannot_be_served_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: dict[str, Any], named: str
) -> None:
    monkeypatch.setenv("CATENARY_DATA", str(tmp_path))
    done = COMMAND.run(str(COMMAND.file(tmp_path, "serving", workloads=[workload])))
    assert done.exit_code == 1
    assert named in str(done.exception)


def test_each_seed_of_a_trace_begins_elsewhere() -> None:
    scenario = FILES.load(ROOT / "scenarios" / "packing" / "packing-targets.yaml")
    jobs = [row.job for row in rows_of(scenario) if row.workload == "Azure"]
    assert len(set(jobs)) == len(jobs)
    firsts = {job.skip: job.sessions() for job in jobs}
    assert len(firsts) == len(scenario.seeds)
    for work in firsts.values():
        seconds = work.arrived_ns[-1] / 1e9
        assert scenario.warm_up_s + scenario.duration_s - 20 < seconds <= 1000
