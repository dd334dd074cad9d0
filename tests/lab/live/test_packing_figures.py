"""Figures of moves on real processes: stalls in a stream's own steps, equality, targets."""

from __future__ import annotations

import json

import pytest

from catenary_lab.live.packing.figures import (
    Answer,
    Change,
    Drained,
    LayoutMeasured,
    Moved,
    spread,
)
from catenary_lab.live.packing.load import prompt_of
from catenary_lab.live.packing.run import plan_document
from catenary_lab.scenarios.packing.live_moves import report
from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.packing.schema import FILES
from catenary_services.errors import InvalidInput

SCENARIO = {
    "kind": "live",
    "title": "moves",
    "layouts": [
        {"label": "whole", "moves": 2, "drained": 1},
        {"label": "cut", "moves": 2, "chains": [[{"agent": 0, "blocks": [0, 6]}]]},
    ],
    "quick": {"layouts": [{"label": "few", "moves": 2}]},
}


def answer(*gaps: int, changes: tuple[Change, ...] = (), **facts: object) -> Answer:
    return Answer(0, tuple(range(len(gaps))), gaps_ns=gaps, changes=changes, **facts)


def test_a_stall_is_measured_in_the_steps_of_its_stream_at_that_time() -> None:
    moved = (Change("kv", 3), Change("restart", 6), Change("tokens", 8))
    found = answer(500, 10, 10, 30, 10, 10, 900, 10, 20, 10, changes=moved)
    assert found.stalls() == [("kv", 3.0), ("tokens", 2.0)]
    assert dict(found.steps())[1] == 1.0, "gaps at changes are nobody's pace"
    slower = answer(1, *[10] * 20, *[40] * 20, changes=(Change("kv", 35),))
    assert slower.stalls() == [("kv", 1.0)]


def test_the_first_token_is_no_step() -> None:
    assert 0 not in dict(answer(900, 10, 10).steps())
    assert not list(answer(900).steps())


def test_spreads_are_of_nearest_ranks() -> None:
    assert spread([]) is None
    found = spread([float(n) for n in range(1, 101)])
    assert found == {"p50": 50.5, "p99": 99.0, "max": 100.0, "count": 100}
    assert spread([2.0])["p99"] == 2.0


def measured(scenario: LiveMoves, *, stall: int = 20, lost: bool = False) -> list[LayoutMeasured]:
    reference = Answer(0, (7, 8, 9, 10))
    gaps = (1, 10, stall, 10)
    moved = Answer(0, (7, 8, 9, 10), "LOST: gone" if lost else "", gaps, (Change("kv", 2),))
    moves = (
        Moved("kv", "moved", "", 40, 2, 30.0, 1.0),
        Moved("tokens", "moved", "", 40, 1, 60.0, 2.0),
        Moved("tokens", "failed", "no room"),
        Moved("kv", "none", "it ended"),
    )
    return [
        LayoutMeasured(
            layout,
            ("agent-0 [0,6)",),
            (reference,),
            (moved,),
            moves,
            12_000_000,
            Drained(1, 1.5, True, (moved,)) if layout.drained else None,
            9.0,
        )
        for layout in scenario.layouts
    ]


def test_a_report_shows_targets_beside_figures() -> None:
    scenario = FILES.parse(SCENARIO)
    assert isinstance(scenario, LiveMoves)
    facts = report(scenario, measured(scenario)).facts["live"]
    json.dumps(facts)
    whole, cut = facts["layouts"]
    assert (whole["equal"], whole["lost"], whole["restarts"]) == (1, 0, 0)
    assert whole["moves"]["kv"]["moved"] == 1
    assert whole["moves"]["kv"]["not_begun"] == 1
    assert whole["moves"]["tokens"]["failed"] == 1
    assert whole["moves"]["kv"]["stall_steps"]["p99"] == 2.0
    assert cut["drain"] is None
    assert len(facts["targets"]) == 6 + 4
    assert facts["met"]


@pytest.mark.parametrize(
    ("facts", "missed"),
    [
        ({"stall": 31}, "stall by kv, decode steps, p99"),
        ({"lost": True}, "answers that differ or are lost"),
    ],
)
def test_a_target_that_is_missed_is_said(facts: dict[str, object], missed: str) -> None:
    scenario = FILES.parse(SCENARIO)
    assert isinstance(scenario, LiveMoves)
    found = report(scenario, measured(scenario, **facts)).facts["live"]
    assert not found["met"]
    assert missed in {each["what"] for each in found["targets"] if not each["met"]}


def test_wrong_scenarios_are_refused() -> None:
    chains = SCENARIO["layouts"][1]["chains"]
    both = {"label": "x", "moves": 2, "drained": 1, "chains": chains}
    for wrong in (
        {**SCENARIO, "layouts": [both]},
        {**SCENARIO, "layouts": [SCENARIO["layouts"][0]] * 2},
        {**SCENARIO, "layouts": []},
    ):
        with pytest.raises(InvalidInput):
            FILES.parse(wrong)
    quick = FILES.parse(SCENARIO, quick=True)
    assert [each.label for each in quick.layouts] == ["few"]


def test_a_layout_becomes_a_plan() -> None:
    scenario = FILES.parse(SCENARIO)
    assert isinstance(scenario, LiveMoves)
    document = plan_document(scenario, scenario.layouts[1])
    (chain,) = document["models"][0]["chains"]
    assert chain == {
        "capacity": scenario.max_batch,
        "hops": [{"agent": "agent-0", "blocks": [0, 6]}],
    }


def test_prompts_differ_in_words_and_length() -> None:
    prompts = [prompt_of(number) for number in range(20)]
    assert len(set(prompts)) == 20
    assert len(prompts[0]) > 4 * len(prompts[1])
