"""`catenaryd plan chains` as a script calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_lab.chains.exact import one_chain_response_s, two_chains_response_s
from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli
from reference_data import reference

ROOT = Path(__file__).resolve().parents[3]
KEYS = {"max_blocks", "gbpcr", "cache_slots", "gca", "bounds", "tuning"}
THROUGH_THE_COMMAND = ("fig2", "infeasible-memory", "bloom-ripe-J20-eta0.2-c7-lam0.2")
SMALL: dict[str, Any] = {
    "servers": [
        {"memory": 6, "tau_c": 0.1, "tau_p": 0.1},
        {"memory": 6, "tau_c": 0.2, "tau_p": 0.1},
    ],
    "L": 6,
    "s_m": 1,
    "s_c": 0.15,
    "lambda": 0.5,
    "rho_bar": 0.7,
    "c": 2,
}


@pytest.fixture(scope="module")
def instances() -> dict[str, dict[str, Any]]:
    instances = json.loads(reference("chain/golden.json").read_text())["instances"]
    return {each["name"]: each for each in instances}


def _run(asked: dict[str, Any] | str, *arguments: str) -> Result:
    text = asked if isinstance(asked, str) else json.dumps(asked)
    return CliRunner().invoke(cli, ["plan", "chains", "-", *arguments], input=text)


def _json(asked: dict[str, Any], *arguments: str) -> dict[str, Any]:
    result = _run(asked, "--json", *arguments)
    assert result.exit_code == 0, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _same(answer: Any, expected: Any, where: str) -> None:
    """Floats within 1e-9, everything else equal, types included."""
    if isinstance(expected, dict):
        assert set(answer) == set(expected), where
        for key, value in expected.items():
            _same(answer[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(answer) == len(expected), where
        for at, value in enumerate(expected):
            _same(answer[at], value, f"{where}[{at}]")
    elif isinstance(expected, float):
        assert answer == pytest.approx(expected, rel=1e-9, abs=0), where
    else:
        assert answer == expected, where
        assert (answer is None) == (expected is None), where


def test_every_reference_instance_is_answered_as_expected(
    instances: dict[str, dict[str, Any]],
) -> None:
    assert len(instances) >= 40
    for name, instance in instances.items():
        answer = _json(instance["input"])
        assert set(answer) == KEYS
        # Ties between paths are broken as the conventions say, so tied instances match as well.
        _same(answer, {key: instance["expected"][key] for key in KEYS}, name)


def test_reference_responses_are_exact_for_two_chains_and_within_bounds_for_more(
    instances: dict[str, dict[str, Any]],
) -> None:
    equal = 0
    for name, instance in instances.items():
        exact = instance["expected"]["exact_mean_response"]
        if exact is None:
            continue
        answer = _json(instance["input"])
        bounds, chains = answer["bounds"], answer["gca"]["chains"]
        assert bounds["response_lower"] <= exact * (1 + 1e-9), name
        assert exact <= bounds["response_upper"] * (1 + 1e-9), name
        arrivals = Fraction(str(instance["input"]["lambda"]))
        rates = [1 / Fraction(str(chain["service_time"])) for chain in chains]
        capacities = [chain["capacity"] for chain in chains]
        if len(chains) == 2 and sum(capacities) <= 40:
            two = two_chains_response_s(tuple(capacities), tuple(rates), arrivals)
            assert float(two) == pytest.approx(exact, rel=1e-9), name
        elif len(chains) == 1:
            one = one_chain_response_s(capacities[0], float(rates[0]), float(arrivals))
            assert one == pytest.approx(exact, rel=1e-9), name
        equal += len(chains) <= 2
    assert equal >= 3


@pytest.mark.parametrize("name", THROUGH_THE_COMMAND)
def test_the_real_command_reads_a_file(
    instances: dict[str, dict[str, Any]], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "servers.json"
    file.write_text(json.dumps(instances[name]["input"]))
    done = subprocess.run(
        [sys.executable, "-m", "catenaryd", "plan", "chains", str(file), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    _same(json.loads(done.stdout), {k: instances[name]["expected"][k] for k in KEYS}, name)


def test_stop_rule_comes_from_the_option_the_file_or_algorithm_1() -> None:
    light = SMALL | {"lambda": 0.01, "L": 4}
    assert _json(light)["gbpcr"]["num_blocks"] == [4, 0]
    assert _json(light | {"stop": "all"})["gbpcr"]["num_blocks"] == [4, 4]
    assert _json(light | {"stop": "all"}, "--stop", "rate")["gbpcr"]["num_blocks"] == [4, 0]
    assert _json(light, "--stop", "all")["gbpcr"]["num_blocks"] == [4, 4]


def test_without_c_the_best_one_is_taken() -> None:
    asked = {key: value for key, value in SMALL.items() if key != "c"}
    answer = _json(asked)
    best = answer["tuning"]["lower"]
    assert answer == _json(asked | {"c": best["c"]})
    assert answer["bounds"]["response_lower"] == pytest.approx(best["response_lower"])


def test_links_replace_communication_times() -> None:
    asked = SMALL | {
        "links": [
            {"from": None, "to": 1, "seconds": 0.3},
            {"from": 1, "to": 0, "seconds": 0.05},
            {"from": 0, "to": None, "seconds": 0.2},
        ]
    }
    gca = _json(asked | {"servers": SMALL["servers"][::-1]})["gca"]
    assert [chain["servers"] for chain in gca["chains"]] == [[1, 0]]
    assert gca["chains"][0]["service_time"] == pytest.approx(0.3 + 0.05 + 0.2 + 0.6)


def test_no_servers_is_infeasible_and_no_error() -> None:
    answer = _json(SMALL | {"servers": []})
    assert answer["gca"]["chains"] == []
    assert answer["bounds"] is None
    assert answer["tuning"] == {"c_max": 0, "surrogate": None, "lower": None, "upper": None}


def test_a_table_is_for_people() -> None:
    text = _run(SMALL).stdout
    assert "0: 1-4  1: 5-6" in text
    assert "best c: lower" in text
    assert "mean response" in text
    assert "no chain through all blocks" in _run(SMALL | {"servers": []}).stdout


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("L", SMALL | {"L": 2.5}),
        ("L", SMALL | {"L": True}),
        ("L", {key: value for key, value in SMALL.items() if key != "L"}),
        ("s_m", SMALL | {"s_m": 0}),
        ("s_c", SMALL | {"s_c": "0.1"}),
        ("lambda", SMALL | {"lambda": -1}),
        ("rho_bar", SMALL | {"rho_bar": 1.5}),
        ("c", SMALL | {"c": 0}),
        ("stop", SMALL | {"stop": "never"}),
        ("sotp", SMALL | {"sotp": "all"}),
        ("servers", SMALL | {"servers": {}}),
        ("servers[0]", SMALL | {"servers": [5]}),
        ("servers[0].tau_p", SMALL | {"servers": [{"memory": 1, "tau_c": 1}]}),
        ("servers[0].tau_c", SMALL | {"servers": [{"memory": 1, "tau_c": -1, "tau_p": 1}]}),
        ("servers[0].gpu", SMALL | {"servers": [{"memory": 1, "tau_c": 1, "tau_p": 1, "gpu": 1}]}),
        ("links[0].to", SMALL | {"links": [{"from": None, "to": 2, "seconds": 1}]}),
        ("links[0].seconds", SMALL | {"links": [{"from": None, "to": 1}]}),
        ("links", SMALL | {"links": 1}),
        ("lambda", json.dumps(SMALL).replace('"lambda": 0.5', '"lambda": 1e999999999')),
        ("file", json.dumps(SMALL).replace('"lambda": 0.5', '"lambda": NaN')),
        ("file", "nothing"),
        ("input", "[]"),
    ],
)
def test_what_is_wrong_is_named(field: str, asked: dict[str, Any] | str) -> None:
    result = _run(asked, "--json")
    assert isinstance(result.exception, InvalidInput)
    assert result.exception.field == field


def test_a_missing_file_is_one_sentence_on_stderr_and_exit_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "catenaryd", "plan", "chains", str(tmp_path / "none.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "none.json" in done.stderr
