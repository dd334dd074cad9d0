"""`catenaryd replay ...` as a script calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli, main
from reference_data import reference

ROOT = Path(__file__).resolve().parents[3]
PERF = {"k1": 0.1, "c1": 10, "k2": 0.001, "c2": 0.05, "c3": 20, "h": 1, "j": 0, "t1": None}
PARAMS = {"T_pre": 600, "T_dec": 30, "M": 5000, "gamma": 0.5, "theta": 0.9, "split_decode": False}
REQUEST = {"id": 1, "l_in": 100, "l_pred": 200}
PLACEMENT = {"perf": PERF, "params": PARAMS, "workers": [[]], "request": REQUEST}
REBALANCE = {
    "perf": PERF,
    "workers": 2,
    "events": [{"worker": 0, "kind": "under", "l_pred": 1, "l_pred_new": 2}],
    "new": [{**REQUEST, "worker": 1}],
    "ongoing": None,
    "params": None,
}


def golden(kind: str) -> Path:
    return reference(f"llm/aladdin_{kind}.json")


def run(kind: str, asked: Any, *arguments: str) -> Result:
    text = asked if isinstance(asked, str) else json.dumps(asked)
    return CliRunner().invoke(cli, ["replay", kind, "-", *arguments], input=text)


def results(kind: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers to cases that do not say what is expected."""
    bare = [{key: value for key, value in case.items() if key != "expect"} for case in cases]
    outcome = run(kind, {"cases": bare}, "--json")
    assert outcome.exit_code == 0, outcome.exception
    document = json.loads(outcome.stdout)
    assert set(document) == {"results"}
    answers: list[dict[str, Any]] = document["results"]
    return answers


def test_every_placement_case_is_answered_as_expected() -> None:
    cases = json.loads(golden("placement").read_text())["cases"]
    answers = results("placement", cases)
    assert len(answers) == len(cases) >= 24
    for case, answer in zip(cases, answers, strict=True):
        expected, name = case["expect"], case["name"]
        assert answer["worker"] == expected["worker"], name
        for mine, theirs in zip(answer["constraints"], expected["constraints"], strict=True):
            assert mine["worker"] == theirs["worker"], name
            assert mine["norm"] == pytest.approx(theirs["norm"], abs=1e-6), name
            for bound in "bcde":
                assert mine[bound]["ok"] is theirs[bound]["ok"], (name, bound)
                for side in ("lhs", "rhs"):
                    where = (name, mine["worker"], bound, side)
                    assert (mine[bound][side] is None) is (theirs[bound][side] is None), where
                    if theirs[bound][side] is not None:
                        close = pytest.approx(theirs[bound][side], rel=1e-9, abs=1e-6)
                        assert mine[bound][side] == close, where


def test_every_rebalance_case_is_answered_as_expected() -> None:
    cases = json.loads(golden("rebalance").read_text())["cases"]
    answers = results("rebalance", cases)
    assert len(answers) == len(cases) >= 22
    for case, answer in zip(cases, answers, strict=True):
        expected, name = case["expect"], case["name"]
        assert (answer["l_e"], answer["b_e"]) == (expected["l_e"], expected["b_e"]), name
        assert answer["objective"] == pytest.approx(expected["objective_best"], abs=1e-6), name
        moved = sum(answer["assignment"][str(each["id"])] != each["worker"] for each in case["new"])
        assert moved == expected["fewest_moves"], name
        if expected["optima"] == 1:
            assert answer["assignment"] == expected["assignment"], name


def test_people_get_a_line_for_each_case() -> None:
    placed = run("placement", {"cases": [PLACEMENT, {**PLACEMENT, "name": "again"}]})
    assert placed.output == "case 0: worker 0\nagain: worker 0\n"
    moved = run("rebalance", {"cases": [REBALANCE]})
    assert moved.output.startswith("case 0: error 1.03")


@pytest.mark.parametrize(
    ("kind", "case", "change", "message"),
    [
        ("placement", PLACEMENT, {"perf": {**PERF, "k1": None}}, "perf.k1: is missing"),
        ("placement", PLACEMENT, {"perf": {**PERF, "k2": "0"}}, "perf.k2: must be a number"),
        ("placement", PLACEMENT, {"perf": {**PERF, "c1": -1}}, "perf.c1: must be 0 or more"),
        ("placement", PLACEMENT, {"perf": [1]}, "perf: must be a JSON object"),
        (
            "placement",
            PLACEMENT,
            {"params": {**PARAMS, "theta": 2}},
            "theta: must be between 0 and",
        ),
        ("placement", PLACEMENT, {"params": {**PARAMS, "T_dec": 0}}, "params.T_dec: must be"),
        ("placement", PLACEMENT, {"params": {**PARAMS, "M": 10**400}}, "params.M: must be"),
        ("placement", PLACEMENT, {"workers": 2}, "workers: must be a list"),
        ("placement", PLACEMENT, {"workers": [[{}]]}, "workers[0][0].l_in: is missing"),
        ("placement", PLACEMENT, {"request": {"l_in": 1.5}}, "request.l_in: must be a whole"),
        ("placement", PLACEMENT, {"request": {**REQUEST, "new": 1}}, "request.new: must be true"),
        ("rebalance", REBALANCE, {"workers": 0}, "workers: must be between 1"),
        ("rebalance", REBALANCE, {"events": [{"worker": 2}]}, "events[0].worker: must be between"),
        ("rebalance", REBALANCE, {"events": [{"worker": 0}]}, "events[0].kind: is neither"),
        ("rebalance", REBALANCE, {"new": [{**REQUEST, "worker": 5}]}, "new[0].worker: must be"),
        ("rebalance", REBALANCE, {"new": REBALANCE["new"] * 2}, "new: two requests have the same"),
        ("rebalance", REBALANCE, {"params": PARAMS}, "ongoing: is missing"),
        (
            "rebalance",
            REBALANCE,
            {"params": PARAMS, "ongoing": [[]]},
            "ongoing: must be a list for",
        ),
    ],
)
def test_a_wrong_field_is_named(
    kind: str, case: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    outcome = run(kind, {"cases": [case, {**case, **change}]}, "--json")
    assert isinstance(outcome.exception, InvalidInput)
    assert outcome.exception.message.startswith("cases[1].")
    assert message in outcome.exception.message
    assert "\n" not in outcome.exception.message
    assert outcome.stdout == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"cases": [NaN]}', "[" * 100_000, '{"cases": 3}'])
def test_what_is_no_case_file_is_refused(text: str) -> None:
    assert isinstance(run("placement", text).exception, InvalidInput)


def test_the_command_ends_with_one_sentence_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cases.json"
    file.write_text('{"cases": [{"perf": {}}]}')
    monkeypatch.setattr(sys, "argv", ["catenaryd", "replay", "placement", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "cases[0].perf.k1: is missing\n")
