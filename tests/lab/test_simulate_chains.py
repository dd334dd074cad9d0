"""`catenaryd simulate chains`: scenario files in, tables, facts and plots out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from catenary_lab.scenarios.chains.schema import FILES
from catenary_services.errors import InvalidInput
from cluster_harness import ROOT
from shared_helpers.scenario_command import ScenarioCommand

SCENARIOS = sorted((ROOT / "scenarios" / "chains").glob("*.yaml"))
BASE: dict[str, Any] = {
    "model": {
        "name": "m",
        "blocks": 8,
        "block_gb": 1,
        "cache_gb": 0.2,
        "hidden_size": 14336,
        "parameters_per_block": 10**9,
    },
    "gpus": {"gpu": {"memory_gb": 12, "block_ms": 100, "forward_rps": 100, "network_rps": 100}},
    "servers": [{"name": f"s{number}", "gpu": "gpu", "rtt_ms": 10 * number} for number in range(4)],
}
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.1234567,{100 + second},{1 + second % 9}\n"
    for second in range(60)
)
OF_KIND: dict[str, dict[str, Any]] = {
    "serve": {
        "systems": [
            {"label": "ours"},
            {"label": "c=2", "c": 2, "stop": "rate"},
            {"label": "replayed", "c": "replay"},
            {"label": "PETALS", "planner": "petals"},
            {"label": "BPRR", "planner": "bprr"},
        ],
        "workloads": [
            {"label": "steady", "requests": 60, "rate_per_s": 0.5},
            {"label": "bursty", "requests": 60, "rate_per_s": 0.5, "arrivals": "gamma:3"},
        ],
        "expected": {"steady": {"ours": 1.5}},
    },
    "policies": {"policies": ["jffc", "jiq"], "c": 2, "loads": [0.3, 0.8], "requests": 80},
    "tuning": {"rates_per_s": [0.2, 0.8], "curve_rate_per_s": 0.2, "requests": 80},
    "placement": {"c": 2, "rates_per_s": [0.2], "placements": 10},
    "allocation": {"c": 2, "loads": [0.3, 0.6]},
    "chats": {
        "workers": {
            name: {
                "prefill_token_ms": 0.2 * factor,
                "prefill_ms": 10 * factor,
                "decode_context_token_ms": 0.001,
                "decode_session_ms": factor,
                "decode_ms": 20 * factor,
                "gpu_memory_gb": 24,
                "weights_gb": 14,
                "token_bytes": 500_000,
            }
            for name, factor in (("new", 1.0), ("old", 2.0))
        },
        "agents": ["new", "old"],
        "slots": 8,
        "objectives": {"ttft_ms": 800, "atgt_ms": 90},
        "lengths": {
            "prompt": {"median": 100, "sigma": 0.5},
            "answer": {"median": 40, "sigma": 0.5},
            "count": 200,
        },
        "rates_per_s": [1, 4],
        "duration_s": 10,
        "policies": ["jffc", "least-time"],
    },
}
COMMAND = ScenarioCommand(
    "chains",
    {"title": "small"},
    {kind: own if kind == "chats" else BASE | own for kind, own in OF_KIND.items()},
)


@pytest.mark.parametrize("kind", FILES.kinds)
def test_every_kind_prints_tables_and_one_json_object(tmp_path: Path, kind: str) -> None:
    path = COMMAND.file(tmp_path, kind)
    assert "# small" in COMMAND.text(path)
    facts = COMMAND.facts(path)
    assert facts["scenario"] == kind
    assert facts["policies"]


def test_a_scenario_may_come_from_the_standard_input(tmp_path: Path) -> None:
    text = COMMAND.file(tmp_path, "allocation").read_text()
    done = COMMAND.run("-", "--workers", "1", text=text)
    assert done.exit_code == 0, done.output
    assert "# small" in done.output


def test_every_policy_has_the_promised_figures(tmp_path: Path) -> None:
    policies = COMMAND.facts(COMMAND.file(tmp_path, "serve"))["policies"]
    assert len(policies) == 10
    for policy in policies:
        times = ("mean_response_s", "median_s", "p95_s", "p99_s", "mean_service_s")
        assert all(policy[key] > 0 for key in times)
        assert policy["mean_wait_s"] >= 0
        assert policy["median_s"] <= policy["p95_s"] <= policy["p99_s"]
        total = policy["mean_wait_s"] + policy["mean_service_s"]
        assert policy["mean_response_s"] == pytest.approx(total)
        assert (policy["c"] is not None) == (policy["planner"] == "catenary")
    ours = policies[0]
    assert ours["bounds"]["response_lower_s"] <= ours["bounds"]["response_upper_s"]


def test_the_same_file_gives_the_same_facts_however_many_processes(tmp_path: Path) -> None:
    path = COMMAND.file(tmp_path, "policies")
    assert COMMAND.facts(path) == COMMAND.facts(path, workers=2)


def test_out_writes_facts_plots_and_the_document(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    paths = [str(COMMAND.file(tmp_path, kind)) for kind in FILES.kinds]
    done = COMMAND.run(*paths, "--workers", "1", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert done.output == ""
    assert len(list(out.iterdir())) == 2 * len(FILES.kinds)
    for kind in FILES.kinds:
        assert (out / f"{kind}.png").stat().st_size > 1000
        assert json.loads((out / f"{kind}.json").read_text())["policies"]


def test_chats_say_how_evenly_each_policy_uses_the_agents(tmp_path: Path) -> None:
    policies = COMMAND.facts(COMMAND.file(tmp_path, "chats"))["policies"]
    assert len(policies) == 2 * 2 * 2
    for each in policies:
        assert 1.0 <= each["unevenness"] <= 2.0
        assert 0 < each["ttft_p50_ms"] < each["response_ms"]
        assert 0.0 <= each["attainment"] <= 1.0
    even = {(each["rate_per_s"], each["named"], each["policy"]): each for each in policies}
    # At one chat a second JFFC leaves the old agent idle, whatever requests say.
    assert even[1, False, "jffc"]["unevenness"] == even[1, True, "jffc"]["unevenness"] == 2.0
    best = even[4, False, "least-time"]
    assert best["unevenness"] < even[4, False, "jffc"]["unevenness"]
    assert best["response_ms"] < even[4, False, "jffc"]["response_ms"]


def test_an_agent_of_no_known_kind_is_named(tmp_path: Path) -> None:
    done = COMMAND.run(str(COMMAND.file(tmp_path, "chats", agents=["new", "older"])))
    assert done.exit_code != 0
    assert "older" in str(done.exception)


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    spec = {"file": str(trace), "speed": 2}
    workloads = [
        {"label": "as it was", "requests": 40, "arrivals": "trace", "trace": spec},
        {"label": "Poisson", "requests": 40, "rate_per_s": 1.0, "trace": spec},
    ]
    path = COMMAND.file(tmp_path, "serve", workloads=workloads)
    facts = COMMAND.facts(path)["policies"]
    assert {fact["case"] for fact in facts} == {"as it was", "Poisson"}
    assert all(fact["requests"] == 40 for fact in facts)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"colour": "red"}, "serve.yaml.colour"),
        ({"systems": []}, "serve.yaml.systems"),
        ({"model": {**BASE["model"], "blocks": 0}}, "serve.yaml.model.blocks"),
        ({"systems": [{"label": "x", "policy": "fifo"}]}, "serve.yaml.systems.0.policy"),
        ({"workloads": [{"requests": 1}]}, "rate_per_s is needed"),
        ({"workloads": [{"requests": 1, "arrivals": "trace"}]}, "needs a trace"),
        ({"servers": [{"name": "a", "gpu": "none", "rtt_ms": 1}]}, "no kind of GPU"),
        ({"servers": [{"name": "a", "gpu": "gpu", "rtt_ms": 1}] * 2}, "same name"),
        ({"kind": "nothing"}, "serve.yaml.kind"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        FILES.load(COMMAND.file(tmp_path, "serve", **changes))


def test_errors_are_one_sentence_and_exit_1(tmp_path: Path) -> None:
    workloads = [{"requests": 9, "arrivals": "trace", "trace": {"file": "nowhere.csv"}}]
    done = COMMAND.run(str(COMMAND.file(tmp_path, "serve", workloads=workloads)), "--workers", "1")
    assert isinstance(done.exception, InvalidInput) or done.exit_code == 1
    assert "nowhere.csv" in str(done.exception) + done.output


def test_an_unplaceable_model_is_said_to_be_so(tmp_path: Path) -> None:
    servers = [{"name": "only", "gpu": "gpu", "rtt_ms": 1}]
    model = {**BASE["model"], "blocks": 80}
    path = COMMAND.file(tmp_path, "serve", servers=servers, model=model)
    assert "not placeable" in COMMAND.text(path)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_project_has_a_short_form_that_runs(path: Path) -> None:
    done = COMMAND.run(str(path), "--quick", "--workers", "1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["policies"]


def test_quick_replaces_keys_and_is_validated_too() -> None:
    document = COMMAND.document("serve", quick={"seeds": [5]})
    assert FILES.parse(document, quick=True).seeds == [5]  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match=r"scenario\.quick\.seeds"):
        FILES.parse({**document, "quick": {"seeds": []}}, quick=True)
