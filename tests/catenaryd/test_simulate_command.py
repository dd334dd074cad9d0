"""`catenaryd simulate pools`: the JSON that scripts rely on, and what people see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import CatenaryError, InvalidInput
from catenaryd.command_line import cli
from scheduling_cases.tiny_dataset import MODELS, RATES, write_dataset

INSTANCE = "set/even/G/tiny"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


def invoke(dataset: Path, *arguments: str) -> Result:
    common = ["simulate", "pools", "--dataset", str(dataset), "--instance", INSTANCE]
    return CliRunner().invoke(cli, [*common, "--duration", "1", *arguments], standalone_mode=False)


def answer(dataset: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(dataset, *arguments, "--json")
    if result.exception is not None:
        raise result.exception
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("planner", ["catenary", "np", "dart-r"])
@pytest.mark.parametrize("dispatch", ["reservation", "reactive"])
def test_the_answer_has_the_promised_keys(dataset: Path, planner: str, dispatch: str) -> None:
    found = answer(dataset, "--planner", planner, "--dispatch", dispatch, "--load", "0.5")
    assert [each["name"] for each in found["models"]] == list(MODELS)
    for each, rate in zip(found["models"], RATES, strict=True):
        assert each["offered_rps"] == rate // 2
        assert each["requests"] == each["finished"] + each["late"] + each["dropped"]
        assert each["attainment"] == each["finished"] / each["requests"]
        assert each["load_factor"] == 0.5
        assert 0 < each["p50_ms"] <= each["p99_ms"]
        assert each["mean_batch"] >= 1
    assert set(found["utilisation"]) == {"fast", "slow"}
    assert all(0 <= share <= 1 for share in found["utilisation"].values())
    assert 0 < found["dispatch_us"]["p50"] <= found["dispatch_us"]["p99"]
    assert found["events_per_second"] > 0


def test_own_rates_follow_from_weights_and_the_objective(dataset: Path) -> None:
    found = answer(dataset, "--base-rps", "own", "--load", "0.5")
    weights = (0.4, 0.6)
    for each, weight in zip(found["models"], weights, strict=True):
        assert each["offered_rps"] == pytest.approx(0.5 * weight * found["objective"], abs=1.5)


def test_the_largest_load_factor_is_looked_for(dataset: Path) -> None:
    found = answer(dataset, "--load", "max", "--base-rps", "own")
    for each in found["models"]:
        assert 0 < each["load_factor"] <= 1.0
        assert each["attainment"] >= 0.99


def test_the_seed_decides_everything_but_the_times_measured(dataset: Path) -> None:
    arguments = ("--arrivals", "gamma:2", "--noise", "0.1", "--stragglers", "0.01:5")
    one, same, other = (answer(dataset, *arguments, "--seed", seed) for seed in ("3", "3", "4"))
    assert one["models"] == same["models"]
    assert one["utilisation"] == same["utilisation"]
    assert one["models"] != other["models"]


def test_a_trace_file_gives_the_arrivals(dataset: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,rps\n0,1\n0.5,0\n")
    found = answer(dataset, "--arrivals", str(trace), "--load", "0.2")
    assert found["models"][0]["requests"] == pytest.approx(RATES[0] * 0.2, rel=0.5)


def test_people_get_a_table(dataset: Path) -> None:
    result = invoke(dataset, "--load", "0.5")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["model", "load", "requests"]
    assert [line.split()[0] for line in lines[1:3]] == list(MODELS)
    assert "dispatch decision: p50" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--instance", "nothing"], "nothing"),
        (["--planner", "reference"], "no plan"),
        (["--load", "much"], "load"),
        (["--load", "-1"], "load"),
        (["--arrivals", "sometimes"], "arrivals"),
        (["--duration", "0"], "duration"),
        (["--stragglers", "2:3"], "stragglers"),
        (["--noise", "-0.1"], "noise"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    dataset: Path, arguments: list[str], complaint: str
) -> None:
    result = invoke(dataset, *arguments)
    assert isinstance(result.exception, InvalidInput)
    assert complaint in result.exception.message
    assert "\n" not in result.exception.message


def test_a_missing_data_set_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "nowhere")
    assert isinstance(result.exception, CatenaryError)
    assert "nowhere" in result.exception.message
