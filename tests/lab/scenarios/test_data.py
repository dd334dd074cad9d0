"""Where scenarios find their data: CATENARY_DATA, CATENARY_TRACES, then the repository's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from catenary_lab.scenarios.chains.schema import FILES, Serve
from catenary_lab.scenarios.data import data_file, data_folder
from catenary_services.errors import InvalidInput
from catenary_simulator.chains.workload import read_trace
from cluster_harness import ROOT

OWN = ROOT / "tests" / "data"
EXCERPT = OWN / "traces" / "azure_code_first_1300.csv"
LONG = [
    path
    for path in sorted((ROOT / "scenarios" / "chains").glob("*.yaml"))
    if path.stem != "trace-tuned"
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CATENARY_DATA", raising=False)
    monkeypatch.delenv("CATENARY_TRACES", raising=False)


def test_without_variables_the_data_are_those_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_folder("ppipe", "dataset") == OWN / "ppipe"
    assert data_file("chain/golden.json", "file") == OWN / "chain" / "golden.json"


def test_a_folder_that_is_set_comes_first_and_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chain").mkdir()
    other = tmp_path / "chain" / "golden.json"
    other.write_text("{}")
    monkeypatch.setenv("CATENARY_DATA", str(tmp_path))
    assert data_file("chain/golden.json", "file") == other
    assert data_file("chain/models.json", "file") == OWN / "chain" / "models.json"


def test_an_empty_variable_is_none_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppipe").mkdir()
    monkeypatch.setenv("CATENARY_DATA", "")
    assert data_folder("ppipe", "dataset") == OWN / "ppipe"


def test_whole_traces_have_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "AzureLLMInferenceTrace_code.csv"
    with pytest.raises(InvalidInput, match=r"trace\.file.*CATENARY_TRACES"):
        data_file(trace.name, "trace.file")
    trace.touch()
    monkeypatch.setenv("CATENARY_TRACES", str(tmp_path))
    assert data_file(trace.name, "trace.file") == trace


def test_a_path_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.touch()
    assert data_file(str(mine), "file") == mine


def test_the_excerpt_is_what_its_readme_says() -> None:
    content = EXCERPT.read_bytes()
    assert hashlib.sha256(content).hexdigest() in (EXCERPT.parent / "README.md").read_text()
    assert len(content.splitlines()) == 1301


def test_the_long_forms_ask_for_no_request_that_the_repository_lacks() -> None:
    asked = []
    for path in LONG:
        scenario = FILES.load(path)
        workloads = scenario.workloads if isinstance(scenario, Serve) else []
        for workload in workloads:
            if (spec := workload.trace) is not None:
                trace = read_trace(data_file(spec.file, "file"))
                asked.append(len(trace.part(spec.first, workload.requests)))
    assert max(asked) == 1000
