from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import catenary_services.errors as served
from catenary.command_line import app
from catenary_protos.catenary.v1 import admin_pb2

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ["status"],
    ["machines"],
    ["models"],
    ["infer"],
    ["chat"],
    ["deploy"],
    ["pull"],
    ["undeploy"],
    ["plan"],
    ["plan", "show"],
    ["plan", "explain"],
    ["plan", "apply"],
    ["plan", "replan"],
    ["drain"],
    ["undrain"],
    ["sessions"],
    ["move"],
    ["top"],
    ["requests"],
    ["trace"],
    ["bench"],
]


@pytest.fixture
def catenary(server, monkeypatch):
    """Runs the command against the server; the environment names it."""
    for name in [name for name in os.environ if name.startswith("CATENARY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CATENARY_TARGET", server.target)
    monkeypatch.setenv("CATENARY_ADMIN_TARGET", server.target)

    def run(*arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


@pytest.fixture
def tensor_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6, dtype=np.float32).reshape(2, 3))
    return path


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_every_help_has_an_example(words):
    found = CliRunner().invoke(app, [*words, "--help"])
    assert found.exit_code == 0
    assert "Example: catenary" in found.output
    if words:
        assert all(f"--{name}" in found.output for name in ("target", "admin", "api-key", "json"))
        assert "--tls-ca" in found.output


def test_status_for_people_and_as_json(catenary):
    page = catenary("status").stdout
    assert "scheduler-0" in page
    assert "agent-0" in page
    assert "net:1[0,4)" in page
    assert "agent-0 [0,4), agent-1 [4,9)" in page
    assert "3 sessions" in page
    found = json.loads(catenary("status", "--json").stdout)
    assert found["agents"][0]["state"] == "ready"
    assert found["sessions_in_flight"] == 3
    (chain,) = found["models"][1]["chains"]
    assert (chain["capacity"], chain["sessions"], chain["service_ns"]) == (4, 3, 2_500_000_000)
    assert chain["hops"] == [["agent-0", 0, 4], ["agent-1", 4, 9]]
    assert (chain["role"], chain["lines"]["decode_ns"]) == ("decode", 7.5e6)


def test_status_says_what_became_of_all_requests_that_arrived(catenary, server):
    assert "good" not in catenary("status").stdout
    changed = server.status = copy.deepcopy(server.status)
    counts = {"seconds": 300, "good": 1996, "late": 1, "refused": 3, "client": 9}
    changed.models[0].outcomes.CopyFrom(admin_pb2.RequestOutcomes(**counts))
    page = " ".join(catenary("status").stdout.split())
    assert "99.8 % good, 0.1 % late, 0.2 % refused (of 2000 in 5 min)" in page
    assert json.loads(catenary("status", "--json").stdout)["models"][0]["outcomes"] == counts
    # A share is never rounded to all or nothing while there is an exception.
    changed.models[0].outcomes.good = 10**6
    page = " ".join(catenary("status").stdout.split())
    assert "99.9 % good, 0.1 % late, 0.1 % refused (of 1000004 in 5 min)" in page


def test_status_names_who_leads_which_scheduler_group(catenary, server):
    assert "GROUP" not in catenary("status").stdout
    divided = server.status = copy.deepcopy(server.status)
    divided.groups.add(group=0, scheduler_id="scheduler-7", epoch=64, agents=2)
    divided.groups.add(group=1)
    page = catenary("status").stdout
    assert "agent-0 (group 0)" in page
    rows = [line.split() for line in page.splitlines()]
    assert ["0", "scheduler-7", "64", "2", "0", "0", "0"] in rows
    assert ["1", "nobody", "0", "0", "0", "0", "0"] in rows
    found = json.loads(catenary("status", "--json").stdout)
    assert [group["scheduler_id"] for group in found["groups"]] == ["scheduler-7", ""]


def test_status_names_versions_while_they_differ(catenary, server):
    status = server.status = copy.deepcopy(server.status)
    status.versions.add(role="scheduler", name="scheduler-0", version="0.2.0")
    status.versions.add(role="agent", name="agent-0", version="0.2.0")
    assert "version 0.2.0" in catenary("status").stdout
    status.versions.add(role="gateway", name="gateway-0")
    page = " ".join(catenary("status").stdout.split())
    assert "0.2.0: scheduler scheduler-0, agent agent-0; older: gateway gateway-0" in page
    found = json.loads(catenary("status", "--json").stdout)
    assert found["versions"][2] == {"role": "gateway", "name": "gateway-0", "version": ""}


def test_models_are_listed_with_the_reason_they_are_not_ready(catenary):
    assert "no agent has room" in catenary("models").stdout
    found = json.loads(catenary("models", "--json").stdout)
    assert [model["ready"] for model in found] == [True, False]


def test_top_prints_once_in_a_pipe(catenary):
    page = catenary("top").stdout
    assert "50 %" in page
    assert json.loads(catenary("top", "--once", "--json").stdout)["epoch"] == 7
    assert catenary("top", "--interval", "0").exit_code == 2


def test_requests_lists_the_latest_first(catenary):
    page = catenary("requests").stdout
    assert page.index("r0") < page.index("r1") < page.index("r2")
    assert "OVERLOADED" in page
    assert "20.00" in page
    found = json.loads(catenary("requests", "--limit", "2", "--json").stdout)
    assert [each["request_id"] for each in found] == ["r0", "r1"]
    assert catenary("requests", "--limit", "0").exit_code == 2


def test_trace_prints_a_plain_waterfall(catenary):
    page = catenary("trace", "mine")
    assert page.stdout.startswith("request mine  net:1  OK  20.00 ms\n")
    assert "\x1b" not in page.stdout
    assert page.stdout.count("█") > 10
    assert json.loads(catenary("trace", "--json").stdout)["request_id"] == "latest"


def test_infer_with_tensors(catenary, server, tensor_file, tmp_path):
    found = catenary(
        "infer",
        "net",
        "--input",
        f"x={tensor_file}",
        "--slo-ms",
        "90",
        "--request-id",
        "mine",
        "--output-dir",
        str(tmp_path / "out"),
    )
    assert found.exit_code == 0, found.output
    assert "FP32" in found.stdout
    assert "request mine" in found.stdout
    assert server.requests[0].parameters["slo_ms"].int64_param == 90
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "x.npy"), np.load(tensor_file))


def test_infer_as_json(catenary, tensor_file):
    found = json.loads(catenary("infer", "net", "--input", f"x={tensor_file}", "--json").stdout)
    assert found["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [2, 3]}]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--input", "x"],
        ["--input", "x=/does/not/exist.npy"],
        ["--input", f"x={__file__}"],
        ["--input", f"x={__file__}", "--image", "cat.jpg"],
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(catenary, arguments):
    found = catenary("infer", "net", *arguments)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr.startswith("error: --i")
    assert found.stderr.count("\n") == 1


def test_errors_of_the_server_are_one_sentence_and_exit_code_1(catenary, server, tensor_file):
    server.failures.append(served.Overloaded("the queue\nis full", retry_after_ns=1_500_000_000))
    found = catenary("infer", "net", "--input", f"x={tensor_file}")
    assert found.exit_code == 1
    assert found.stdout == ""
    assert found.stderr == "error: the queue is full (try again in 1.5 s) [OVERLOADED]\n"


def test_refused_input_is_the_servers_error_not_bad_usage(catenary, server, tensor_file):
    server.failures.append(served.InvalidInput("inputs[0].shape", "has 2 dimensions"))
    found = catenary("infer", "net", "--input", f"x={tensor_file}")
    assert found.exit_code == 1
    assert "inputs[0].shape" in found.stderr


def test_no_server_is_exit_code_1(catenary):
    found = catenary("models", "--target", "127.0.0.1:1")
    assert found.exit_code == 1
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_plain_connections_elsewhere_need_a_word(catenary):
    found = catenary("models", "--target", "gateway.example:8001")
    assert found.exit_code == 2
    assert "insecure" in found.stderr


def test_the_key_comes_from_the_environment_and_is_never_shown(catenary, server, monkeypatch):
    monkeypatch.setenv("CATENARY_API_KEY", "ctn_secret")
    catenary("models")
    assert server.metadata[0]["authorization"] == "Bearer ctn_secret"
    assert "ctn_secret" not in catenary("models", "--help").output


def test_plans_are_shown_explained_and_applied(catenary, server, tmp_path):
    shown = catenary("plan", "show").stdout
    (tmp_path / "plan.json").write_text(shown)
    assert catenary("plan", "explain").stdout == "net on agent-0\n"
    assert catenary("plan", "apply", str(tmp_path / "plan.json")).stdout == "plan-4\n"
    assert catenary("plan", "apply", "-", stdin=shown).stdout == "plan-4\n"
    assert server.orders == [{"models": [{"name": "net"}]}] * 2


def test_what_would_serve_a_model_is_told_with_all_that_would_not(catenary, server):
    asked = ("plan", "--model", "net", "--gpus", "new=1", "--gpus", "l4 1/2=2", "--rate", "3")
    page = catenary(*asked).stdout
    assert "net:1: whole replicas" in page
    assert "does not survive the loss of any one GPU" in page
    assert "batches of up to 8: blocks 0 to 8 on new-1" in page
    assert "it would not survive the loss of an agent" in page
    assert "old-1 is idle: it is too slow" in page
    assert "Note: by hand." in page
    request = server.orders[-1]
    assert [(each.device_class, each.count) for each in request.gpus] == [("new", 1), ("l4 1/2", 2)]
    assert (request.rate_per_s, request.objective) == (3.0, "throughput")
    found = json.loads(catenary(*asked, "--json").stdout)
    assert found["options"][0]["pipelines"][0]["stages"][0]["agent_ids"] == ["new-1"]
    assert found["idle"] == [{"gpu": "old-1", "why": "it is too slow"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "new=1"], "--model"),
        (["--model", "net"], "--gpus"),
        (["--model", "net", "--gpus", "new"], "'new' is not CLASS=COUNT"),
        (["--model", "net", "--gpus", "new=0"], "CLASS=COUNT"),
        (["--model", "net", "--gpus", "a=1", "--gpus", "a=2"], "names a twice"),
        (["--model", "net", "--gpus", "a=1", "--objective", "speed"], "objective"),
        (["--json", "show"], "--json goes behind `plan show`"),
    ],
)
def test_a_question_about_a_plan_that_is_none_is_bad_usage(catenary, server, words, said):
    found = catenary("plan", *words)
    assert (found.exit_code, server.orders) == (2, [])
    assert said in found.stderr


def test_planning_anew_says_what_it_cost_and_show_remembers_it(catenary):
    assert "last_switch" not in json.loads(catenary("plan", "show").stdout)
    assert catenary("plan", "replan").stdout == (
        "plan-6 is in force; the longest pause was 21 ms\n"
    )
    shown = json.loads(catenary("plan", "show").stdout)
    assert shown["last_switch"]["downtime"] == [
        {"model": "net", "version": "1", "downtime_ns": 21_000_000}
    ]
    assert catenary("plan", "replan").stdout == (
        "plan-6 stays in force: nothing better was found\n"
    )
    assert json.loads(catenary("plan", "replan", "--json").stdout) == {
        "plan_id": "plan-6",
        "changed": False,
        "switch": None,
    }


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_plan_is_bad_usage(catenary, text):
    assert catenary("plan", "apply", "-", stdin=text).exit_code == 2


def test_deploy_and_drain(catenary, server):
    found = catenary("deploy", "net", "--slo-ms", "200", "--partitions", "3", "--json")
    assert json.loads(found.stdout) == {"plan_id": "plan-5"}
    assert (server.orders[0].slo_ns, server.orders[0].packing) == (200_000_000, "")
    assert catenary("deploy", "net", "--packing", "balance").exit_code == 0
    assert server.orders[1].packing == "balance"
    assert catenary("drain", "agent-0").stdout == "agent-0 is drained\n"
    busy = catenary("drain", "agent-9")
    assert busy.exit_code == 1
    assert "agent-9" in busy.stderr


def test_undeploy_and_undrain(catenary, server):
    assert catenary("undeploy", "net").stdout == "net:1 is served no longer\n"
    found = catenary("undeploy", "net:2", "--json")
    assert json.loads(found.stdout) == {"model": "net", "version": "2", "undeployed": True}
    assert [(each.model, each.version) for each in server.orders] == [("net", ""), ("net", "2")]
    assert catenary("undrain", "agent-0").stdout == "agent-0 is used again\n"
    found = catenary("undrain", "agent-0", "--json")
    assert json.loads(found.stdout) == {"agent": "agent-0", "drained": False}


def test_a_source_is_imported_and_then_deployed(catenary, server):
    found = catenary(
        "deploy",
        "hf:org/tiny@v1",
        "--slo-ms",
        "200",
        "--run-on",
        "gpu",
        "--engine",
        "vllm",
        "--hub-token",
        "hf_mine",
        "--json",
    )
    assert json.loads(found.stdout) == {"plan_id": "plan-5"}
    asked, deployed = server.orders
    assert (asked.source, asked.target, asked.hub_token) == ("hf:org/tiny@v1", "gpu", "hf_mine")
    assert (asked.engine, asked.keep_gguf) == ("vllm", False)
    assert (deployed.model, deployed.version, deployed.slo_ns) == ("tiny", "3", 200_000_000)
    said = found.stderr.splitlines()
    assert said[0] == "2 files, 0.9 MB"
    assert said[-1] == "checking the weights"
    assert "model.safetensors: 0.9 of 0.9 MB fetched (100%)" in said


def test_a_name_with_a_version_is_deployed_without_an_import(catenary, server):
    assert catenary("deploy", "net:2").exit_code == 0
    (deployed,) = server.orders
    assert (deployed.model, deployed.version) == ("net", "2")
    refused = catenary("deploy", "net", "--precision", "int8")
    assert refused.exit_code == 2
    assert "--precision is for a source" in refused.stderr
    refused = catenary("deploy", "net", "--keep-gguf")
    assert refused.exit_code == 2
    assert "--keep-gguf is for a source" in refused.stderr


def test_a_path_is_sent_with_what_identifies_it(catenary, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes(b"graph")
    assert catenary("pull", "net.onnx", "--name", "mine").stdout == "mine:3\n"
    (asked,) = server.orders
    status = (tmp_path / "net.onnx").stat()
    assert asked.source == str(tmp_path / "net.onnx")
    assert asked.path_identity.number == status.st_ino
    assert asked.path_identity.changed_ns == status.st_mtime_ns
    absent = catenary("pull", "./no-such-file")
    assert absent.exit_code == 2
    assert len(absent.stderr.splitlines()) == 1
    assert "no-such-file cannot be read here" in absent.stderr


def test_what_goes_wrong_with_an_import_is_one_sentence(catenary):
    for source, text in (
        ("hf:org/broken", "model.safetensors is not what its source says"),
        ("hf:org/cut", "ended the import without a result"),
    ):
        found = catenary("pull", source)
        assert found.exit_code == 1
        assert text in found.stderr.splitlines()[-1]
    by_name = catenary("pull", "net")
    assert by_name.exit_code == 2
    assert "'net' is a name of the repository" in by_name.stderr


def test_sessions_are_listed_and_moved(catenary, server):
    page = catenary("sessions").stdout
    assert "1099511627783" in page
    assert "chatty/1 by kv" in page
    (listed,) = json.loads(catenary("sessions", "--model", "chatty", "--json").stdout)
    assert (listed["request_id"], listed["tokens"]) == ("mine", 90)
    assert listed["hops"] == [["agent-0", 0, 30]]
    assert json.loads(catenary("sessions", "--model", "net", "--json").stdout) == []
    said = catenary("move", "mine", "--to", "chatty/1", "--by", "tokens").stdout
    assert "on chatty/1 now, by tokens: 88 tokens in 30 ms" in said
    order = server.orders[-1]
    assert (order.request_id, order.session_id, order.mode) == ("mine", 0, "tokens")
    moved = json.loads(catenary("move", "1099511627783", "--wait", "0", "--json").stdout)
    assert (moved["outcome"], moved["session_id"]) == ("begun", 1 << 40 | 8)
    order = server.orders[-1]
    assert (order.session_id, order.mode, order.chain_id) == (1099511627783, "", "")
    failed = catenary("move", "mine", "--to", "full")
    assert failed.exit_code == 1
    assert "it took too long" in failed.stderr
    assert catenary("move", "mine", "--by", "both").exit_code == 2


def test_a_story_is_told(catenary, server):
    page = catenary("sessions", "--story", "mine").stdout
    assert server.orders[-1].request_id == "mine"
    for words in (
        "1.500 s",
        "request",
        "waiting",
        "session lost",
        "SessionFailed 41",
        "1099511627783",
    ):
        assert words in page
    lost, started = json.loads(catenary("sessions", "--story", "1099511627783", "--json").stdout)
    assert server.orders[-1].session_id == 1099511627783
    assert (lost["session_id"], lost["why"]) == (0, "agent-0: COMPUTE_FAILED")
    assert (started["session_id"], started["event"], started["why"]) == (1 << 40 | 7, 41, "")
    assert catenary("sessions", "--story", "0").exit_code == 2


def test_bench_prints_rate_percentiles_and_attainment(catenary, server):
    found = catenary(
        "bench",
        "numbers",
        "--concurrency",
        "2",
        "--seconds",
        "0.3",
        "--slo-ms",
        "5000",
        "--rows",
        "3",
        "--json",
    )
    facts = json.loads(found.stdout)
    assert facts["requests"] == facts["answered"] == len(server.requests) > 2
    assert facts["rate_rps"] > 0
    assert 0 < facts["p50_ms"] <= facts["p90_ms"] <= facts["p99_ms"] <= facts["max_ms"]
    assert facts["attainment"] == 1.0
    assert list(server.requests[0].inputs[0].shape) == [3, 4]
    assert found.stderr == ""


def test_bench_counts_errors_by_reason(catenary, server):
    server.failures.append(served.NoActivePlan("loading"))
    catenary("models")  # takes the failure, so that metadata below is answered
    server.reply = lambda request: 1 / 0
    found = catenary("bench", "net", "--rate", "50", "--seconds", "0.3")
    assert found.exit_code == 1
    assert "error INTERNAL" in found.stdout
    assert "no request was answered (INTERNAL)" in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--rate", "1", "--concurrency", "1"], ["--rate", "0"], ["--seconds", "0"]],
)
def test_impossible_loads_are_bad_usage(catenary, arguments):
    assert catenary("bench", "net", *arguments).exit_code == 2


def test_bench_says_which_input_it_cannot_draw(catenary):
    found = catenary("bench", "words", "--seconds", "0.1")
    assert found.exit_code == 2
    assert "BYTES" in found.stderr


def test_the_command_runs_as_a_process(server):
    paths = os.pathsep.join(str(ROOT / part) for part in ("client", "protos"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "catenary",
            "status",
            "--target",
            server.target,
            "--admin",
            server.target,
        ],
        env={**os.environ, "PYTHONPATH": paths, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "agent-0" in done.stdout
    assert done.stderr == ""
