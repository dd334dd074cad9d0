"""Scenario files: what is accepted, and what a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from catenary_lab.scenarios.pools.schema import (
    FILES,
    Attainment,
    Live,
    LoadFactors,
    matching,
)
from catenary_services.errors import InvalidInput

SCENARIOS = Path(__file__).parents[3] / "scenarios"
POLICIES = [{"label": "ours"}]
ATTAINMENT = {
    "kind": "attainment",
    "title": "t",
    "instances": ["*"],
    "policies": POLICIES,
    "load_factors": [0.5, 1.0],
}


def test_a_scenario_survives_a_round_trip() -> None:
    scenario = FILES.load(SCENARIOS / "load-factors.yaml")
    again = FILES.parse(json.loads(scenario.model_dump_json()))
    assert again == scenario


def test_defaults_are_the_papers() -> None:
    document = {"kind": "load_factors", "title": "t", "instances": ["*"], "policies": POLICIES}
    scenario = FILES.parse(document)
    assert isinstance(scenario, LoadFactors)
    assert (scenario.duration_s, scenario.target, scenario.step) == (30.0, 0.99, 0.05)
    assert scenario.policies[0].dispatch == "reservation"


def test_the_short_form_replaces_keys() -> None:
    document = {**ATTAINMENT, "quick": {"load_factors": [0.7]}}
    full, short = FILES.parse(document), FILES.parse(document, quick=True)
    assert isinstance(full, Attainment)
    assert isinstance(short, Attainment)
    assert (full.load_factors, short.load_factors) == ([0.5, 1.0], [0.7])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], "scenario: must be a mapping"),
        ({"title": "t"}, "scenario.kind: is missing"),
        ({"kind": "party", "title": "t"}, "scenario.kind: 'party' is none of attainment,"),
        ({**ATTAINMENT, "title": ""}, "scenario.title: "),
        ({**ATTAINMENT, "loads": [1]}, "scenario.loads: "),
        ({**ATTAINMENT, "seeds": []}, "scenario.seeds: "),
        ({**ATTAINMENT, "load_factors": [0.5, -1]}, "scenario.load_factors.1: "),
        (
            {**ATTAINMENT, "policies": [{"label": "x", "planner": "best"}]},
            "scenario.policies.0.planner: ",
        ),
        ({**ATTAINMENT, "duration_s": "long"}, "scenario.duration_s: "),
        ({**ATTAINMENT, "expect": [{"name": "n", "value": "1"}]}, "scenario.expect.0: give either"),
        (
            {**ATTAINMENT, "expect": [{"name": "n", "value": "1", "at_least": 1, "at_most": 1}]},
            "scenario.expect.0: give either",
        ),
        ({**ATTAINMENT, "quick": {"seeds": "one"}}, "scenario.quick.seeds: "),
    ],
)
def test_what_is_wrong_is_named(document: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        FILES.parse(document, quick=True)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("kind: [")
    with pytest.raises(InvalidInput, match=r"broken\.yaml: is not YAML"):
        FILES.load(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        FILES.load(tmp_path / "none.yaml")


def test_the_live_scenario_has_one_agent_per_gpu() -> None:
    scenario = FILES.load(SCENARIOS / "live-16.yaml")
    assert isinstance(scenario, Live)
    assert sum(scenario.gpus.values()) == 16


def test_patterns_choose_names_in_order() -> None:
    names = ["maf19/a/G1/HC1-L", "maf19/a/G2/HC1-L", "ablation/x"]
    assert matching(["*/G2/*", "ablation/*"], names, "instances") == names[1:]
    with pytest.raises(InvalidInput, match="nothing is called 'G9'"):
        matching(["G9"], names, "instances")


def test_yaml_files_hold_no_key_twice() -> None:
    for path in SCENARIOS.glob("*.yaml"):
        lines = [line.split(":")[0] for line in path.read_text().splitlines() if line[:1].isalpha()]
        assert len(lines) == len(set(lines)) == len(yaml.safe_load(path.read_text()))
