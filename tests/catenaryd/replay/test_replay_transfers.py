"""`catenaryd replay transfers` as a script calls it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli
from reference_data import reference

ROOT = Path(__file__).resolve().parents[3]
MOVE = {"id": 0, "src": 0, "dst": 1, "kv": 10, "tokens": 5, "links": ["a"]}
CASE = {"moves": [MOVE], "link_cap": {"a": 10}, "compute_cap": {"1": 0}}


def run(cases: Any, *arguments: str) -> Result:
    text = json.dumps({"cases": cases})
    return CliRunner().invoke(cli, ["replay", "transfers", "-", *arguments], input=text)


def assert_within_boundaries(case: dict[str, Any], answer: dict[str, list[int]]) -> None:
    moves = {move["id"]: move for move in case["moves"]}
    assert sorted(answer["kv"] + answer["tokens"] + answer["deferred"]) == sorted(moves)
    sent: Counter[str] = Counter()
    for move in map(moves.get, answer["kv"]):
        assert move is not None
        sent.update(dict.fromkeys(move["links"], move["kv"]))
    assert all(size <= case["link_cap"][link] for link, size in sent.items())
    read: Counter[str] = Counter()
    for move in map(moves.get, answer["tokens"]):
        assert move is not None
        read[str(move["dst"])] += move["tokens"]
    assert all(tokens <= case["compute_cap"][target] for target, tokens in read.items())


def test_every_case_is_divided_as_well_as_possible() -> None:
    cases = json.loads(reference("llm/mell_transfer_split.json").read_text())["cases"]
    bare = [{key: case[key] for key in ("moves", "link_cap", "compute_cap")} for case in cases]
    outcome = run(bare, "--json")
    assert outcome.exit_code == 0, outcome.exception
    answers = json.loads(outcome.stdout)["results"]
    assert len(answers) == len(cases) >= 8
    for case, answer in zip(cases, answers, strict=True):
        assert_within_boundaries(case, answer)
        assert len(answer["deferred"]) <= case["expect"]["greedy_deferred"]
        assert len(answer["deferred"]) == case["expect"]["min_deferred"]  # better than asked


def test_people_get_a_line_for_each_case() -> None:
    waits = {**CASE, "moves": [MOVE, {**MOVE, "id": 7}], "name": "two"}
    assert run([CASE, waits]).output == (
        "case 0: 0 as caches, none as tokens, none deferred\n"
        "two: 0 as caches, none as tokens, 7 deferred\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moves": [{**MOVE, "links": "a"}]}, "moves[0].links: must be a list"),
        ({"moves": [{**MOVE, "links": [1]}]}, "moves[0].links: must be a list of texts"),
        ({"moves": [{**MOVE, "links": ["a", "a"]}]}, "moves[0].links: names a link twice"),
        ({"moves": [{**MOVE, "kv": -1}]}, "moves[0].kv: must be 0 or more"),
        ({"moves": [MOVE, MOVE]}, "moves: two moves have the same id"),
        ({"link_cap": {"a": 0.5}}, "link_cap.a: must be a whole number"),
        ({"compute_cap": None}, "compute_cap: is missing"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    outcome = run([CASE, {**CASE, **change}], "--json")
    assert isinstance(outcome.exception, InvalidInput)
    assert f"cases[1].{message}" in outcome.exception.message
    assert outcome.stdout == ""
