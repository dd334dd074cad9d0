"""Scenario files from end to end, in the simulator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from catenary_lab.scenarios.output import write
from catenary_lab.scenarios.report import Report
from catenary_lab.scenarios.runner import run_scenarios as run_of_kind
from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli

POLICIES = [
    {"label": "Catenary"},
    {"label": "NP", "planner": "np"},
    {"label": "reactive", "dispatch": "reactive", "seeds": [2]},
]
SERVED = {
    "instances": ["set/*"],
    "policies": POLICIES,
    "base_rps": "own",
    "duration_s": 1,
    "step": 0.25,
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "load_factors": {**SERVED, "arrivals": ["poisson", "gamma:4"]},
    "utilisation": SERVED,
    "attainment": {
        "instances": ["set/*"],
        "policies": POLICIES,
        "load_factors": [0.2, 12.0],
        "duration_s": 1,
    },
    "sensitivity": {
        "vary": "gpu_ratio",
        "values": ["1:2", "2:2"],
        "cluster": "tiny",
        "models": ["north"],
        "duration_s": 1,
        "step": 0.25,
    },
    "planner_scaling": {
        "instance": "set/even/G/tiny",
        "gpus": [8, 16],
        "classes": [["slow"], ["fast", "slow"]],
    },
}


def run_scenarios(
    paths: list[Path], told: Callable[[str], None] = lambda _line: None
) -> list[Report]:
    return run_of_kind("pools", paths, workers=1, progress=told)


@pytest.fixture
def file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CATENARY_DATA", str(tiny.parent))

    def make(kind: str, **more: object) -> Path:
        document = {"kind": kind, "title": f"About {kind}", "dataset": "tiny", **SCENARIOS[kind]}
        path = tmp_path / f"{kind.replace('_', '-')}.yaml"
        path.write_text(yaml.safe_dump({**document, **more}))
        return path

    return make


@pytest.mark.parametrize("kind", sorted(SCENARIOS))
def test_a_scenario_is_run_and_written(kind: str, file, tmp_path: Path) -> None:
    path = file(kind)
    (report,) = run_scenarios([path])
    out = tmp_path / "out"
    written = write([report], [{}], out)
    assert {each.name for each in written} == {f"{path.stem}.png", f"{path.stem}.json"}
    assert f"]({path.stem}.png)" in report.markdown()
    assert json.loads((out / f"{path.stem}.json").read_text())


def test_load_factors_are_those_of_every_policy_and_seed(file) -> None:
    (report,) = run_scenarios([file("load_factors")])
    found = report.facts["load_factors"]
    assert {(each["policy"], each["seed"]) for each in found} == {
        ("Catenary", 1),
        ("NP", 1),
        ("reactive", 2),
    }
    assert {each["model"] for each in found} == {"north", "south"}
    ours = {each["model"]: each for each in found if each["policy"] == "Catenary"}
    assert all(0 < each["load_factor"] <= 1 for each in ours.values())
    assert all(each["attainment"] >= 0.99 for each in found)
    assert [table.header for table in report.tables] == [("", "tiny")] * 2
    assert "Gamma, cv 4" in report.tables[1].caption


def test_attainment_falls_with_the_load(file) -> None:
    (report,) = run_scenarios([file("attainment")])
    for curve in report.facts["curves"][0]["attainment"].values():
        (_, low), (_, high) = curve
        assert low > 0.99
        assert high < low


def test_more_fast_gpus_serve_more(file) -> None:
    (report,) = run_scenarios([file("sensitivity")])
    few, many = (float(str(row[4]).split()[0]) for row in report.facts["rows"])
    assert few < many


def test_models_without_a_plan_are_left_out(file) -> None:
    path = file("sensitivity", vary="slo_scale", values=[0.1, 5])
    (report,) = run_scenarios([path])
    none, some = report.facts["rows"]
    assert none == ("0.1", None, None, None, None, "0")
    assert some[-1] == "1"


def test_larger_clusters_promise_more(file) -> None:
    (report,) = run_scenarios([file("planner_scaling")])
    promised = [plan["objective"] for plan in report.facts["plans"]]
    assert promised[0] < promised[1]
    assert promised[2] < promised[3]
    assert all(plan["gap"] < 0.05 for plan in report.facts["plans"])


def test_planning_times_of_many_models_say_where_there_is_no_plan(file) -> None:
    (report,) = run_scenarios([file("planner_scaling", models=[2, 9], classes=[["fast", "slow"]])])
    gaps = report.tables[1].rows
    assert [row[0] for row in gaps] == ["fast + slow, 2 models", "fast + slow, 9 models"]
    (small, large, crowded, _) = report.facts["plans"]
    assert small["models"] == large["models"] == 2
    assert 0 < small["objective"] < large["objective"]
    assert (crowded["models"], crowded["gpus"], crowded["solver"]) == (9, 8, "no plan")
    assert gaps[1][1] == "no plan"


def test_a_live_scenario_is_run_only_when_asked_for(file, tmp_path: Path) -> None:
    path = tmp_path / "live.yaml"
    live = {
        "kind": "live",
        "title": "t",
        "dataset": "tiny",
        "instance": "set/even/G/tiny",
        "gpus": {"fast": 1},
        "dilation": 2,
    }
    file("attainment")
    path.write_text(yaml.safe_dump(live))
    with pytest.raises(InvalidInput, match="--live"):
        run_scenarios([path])


def test_nothing_is_run_if_one_file_is_wrong(file, tmp_path: Path) -> None:
    ran: list[str] = []
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: party")
    with pytest.raises(InvalidInput, match=r"broken\.yaml\.kind"):
        run_scenarios([file("attainment"), broken], ran.append)
    assert ran == []


def test_a_missing_data_set_is_named(file) -> None:
    with pytest.raises(InvalidInput, match="there is no 'elsewhere'"):
        run_scenarios([file("attainment", dataset="elsewhere")])
    with pytest.raises(InvalidInput, match="nothing is called 'G9'"):
        run_scenarios([file("attainment", instances=["G9"])])


# The command


def test_the_command_prints_facts(file) -> None:
    arguments = ["simulate", "pools", str(file("planner_scaling")), "--workers", "1", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["scenario"] == "planner-scaling"
    assert len(facts["plans"]) == 4


def test_the_command_prints_tables(file) -> None:
    arguments = ["simulate", "pools", str(file("planner_scaling")), "--workers", "1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("# About planner_scaling\n")
    assert "| GPU classes | 8 GPUs | 16 GPUs |" in result.stdout


EXPECT = [
    {"name": "plans", "value": "facts.plans|length", "unit": "plans", "at_least": 4},
    {"name": "gap", "value": 'values("plans", "gap")|max', "at_most": -1},
]
LINES = [r"plans +4\.000 plans +limit 4 +ok", r"gap +0\.\d+ +limit -1 +MISSED"]


@pytest.mark.parametrize("form", [[], ["--out", "results"], ["--json"]])
def test_the_command_judges_what_the_scenario_expects(form: list[str], file, tmp_path) -> None:
    path = file("planner_scaling", expect=EXPECT)
    form = [each.replace("results", str(tmp_path / "results")) for each in form]
    result = CliRunner().invoke(cli, ["simulate", "pools", str(path), "--workers", "1", *form])
    assert result.exit_code == 0, result.output
    said = (result.stderr if "--json" in form else result.stdout).splitlines()
    assert said[-3] == "planner-scaling"
    for line, wanted in zip(said[-2:], LINES, strict=True):
        assert re.fullmatch(wanted, line), line
    if "--json" in form:
        assert "expect" not in json.loads(result.stdout)


def test_the_short_form_has_limits_of_its_own_or_none(file) -> None:
    for short, limits in (({"gpus": [8]}, 0), ({"gpus": [8], "expect": EXPECT[1:]}, 1)):
        path = file("planner_scaling", expect=EXPECT, quick=short)
        (report,) = run_of_kind("pools", [path], workers=1, quick=True)
        assert len(report.expect) == limits


def test_nothing_is_run_for_what_is_no_expression(file) -> None:
    ran: list[str] = []
    path = file("planner_scaling", expect=[{**EXPECT[0], "value": "cell(0,"}])
    with pytest.raises(InvalidInput, match=r"expect\.plans: is no expression"):
        run_scenarios([path], ran.append)
    assert ran == []
