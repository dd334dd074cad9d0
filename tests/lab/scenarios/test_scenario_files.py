"""What holds for the scenario files of every kind, and for the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from catenary_lab.scenarios.kinds import kind_named
from cluster_harness import ROOT
from shared_helpers.scenario_command import ScenarioCommand

FIGURES = {
    "pools": {"6", "7", "8", "9", "10", "13a", "13b", "13c", "14"},
    "placement": {"9", "10", "11", "12", "13"},
    "packing": {"6", "11", "12", "13", "14", "15"},
}
KINDS = pytest.mark.parametrize("kind", [*FIGURES, "chains"])


def scenarios_of(kind: str) -> list[Path]:
    return sorted((ROOT / "scenarios" / ("" if kind == "pools" else kind)).glob("*.yaml"))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(kind, path, id=path.stem)
        for kind in (*FIGURES, "chains")
        for path in scenarios_of(kind)
    ],
)
def test_every_scenario_of_the_project_is_valid_in_both_forms(kind: str, path: Path) -> None:
    files = kind_named(kind).files
    assert files.load(path).title
    assert files.load(path, quick=True).kind == files.load(path).kind


@pytest.mark.parametrize("kind", FIGURES)
def test_the_figures_of_the_paper_are_all_there(kind: str) -> None:
    files = kind_named(kind).files
    figures = {each for path in scenarios_of(kind) for each in files.load(path).figure.split(", ")}
    assert figures >= FIGURES[kind]


@KINDS
def test_the_schema_is_printed_and_knows_every_kind(kind: str) -> None:
    files = kind_named(kind).files
    schema = json.loads(ScenarioCommand(kind, {}, {}).run("--schema").output)
    assert schema == files.json_schema()
    mapping = schema["discriminator"]["mapping"]
    assert set(mapping) == set(files.kinds)
    for name in mapping.values():
        assert schema["$defs"][name.rpartition("/")[2]]["additionalProperties"] is False


@KINDS
def test_nothing_to_run_is_bad_usage(kind: str) -> None:
    done = ScenarioCommand(kind, {}, {}).run()
    assert done.exit_code == 2
    assert "scenario files" in done.stderr
