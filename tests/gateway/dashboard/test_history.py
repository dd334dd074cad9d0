"""The last hour of a gateway: what is counted where, what is forgotten, how large it may become."""

from __future__ import annotations

import sys

import pytest

from catenary_gateway.observability.history import (
    MOST_MODELS,
    STEP_S,
    STEPS,
    HistoryStep,
    RequestHistory,
)
from catenary_gateway.observability.outcome_kinds import OutcomeKind

STEP_NS = STEP_S * 10**9
BEGAN_NS = 1000 * STEP_NS
MS = 10**6


@pytest.fixture
def history() -> RequestHistory:
    return RequestHistory(BEGAN_NS)


def test_a_step_tells_what_happened_once_it_is_over(history: RequestHistory) -> None:
    for kind, duration_ns in (
        (OutcomeKind.GOOD, 20 * MS),
        (OutcomeKind.GOOD, 20 * MS),
        (OutcomeKind.LATE, 900 * MS),
        (OutcomeKind.LATE, 0),
        (OutcomeKind.REFUSED, 0),
        (OutcomeKind.CLIENT, 0),
    ):
        history.add("toy:1", BEGAN_NS + MS, kind, duration_ns)
    for _ in range(7):
        history.add_token("toy:1", BEGAN_NS + 2 * MS)
    assert history.of("toy:1", BEGAN_NS + STEP_NS - 1) == [], "the step is not over"
    (step,) = history.of("toy:1", BEGAN_NS + STEP_NS)
    assert step[:-1] == (1000, 2, 2, 1, 7)
    assert 0.95 < step.p99_ns / (900 * MS) < 1.05


def test_looking_changes_nothing(history: RequestHistory) -> None:
    history.add("toy:1", BEGAN_NS, OutcomeKind.GOOD, MS)
    later_ns = BEGAN_NS + 5 * STEP_NS
    assert history.of("toy:1", later_ns) == history.of("toy:1", later_ns)
    history.add("toy:1", later_ns, OutcomeKind.REFUSED)
    steps = history.of("toy:1", later_ns + STEP_NS)
    assert [(step.number, step.good, step.refused) for step in steps] == [
        (1000, 1, 0),
        (1005, 0, 1),
    ]


def test_after_an_hour_a_step_is_forgotten(history: RequestHistory) -> None:
    history.add("toy:1", BEGAN_NS, OutcomeKind.GOOD, MS)
    assert len(history.of("toy:1", BEGAN_NS + STEPS * STEP_NS)) == 1
    assert history.of("toy:1", BEGAN_NS + (STEPS + 1) * STEP_NS) == []


def test_models_are_counted_apart_and_unknown_ones_have_nothing(history: RequestHistory) -> None:
    history.add("toy:1", BEGAN_NS, OutcomeKind.GOOD, MS)
    history.add("", BEGAN_NS, OutcomeKind.REFUSED)
    end_ns = BEGAN_NS + STEP_NS
    assert [step.refused for step in history.of("", end_ns)] == [1]
    assert [step.refused for step in history.of("toy:1", end_ns)] == [0]
    assert history.of("nobody:1", end_ns) == []
    assert set(history.models()) == {"toy:1", ""}


def test_it_says_how_far_back_it_knows(history: RequestHistory) -> None:
    assert history.covered_s(BEGAN_NS) == 0
    assert history.covered_s(BEGAN_NS + 25 * 10**9) == 25
    assert history.covered_s(BEGAN_NS + 2 * STEPS * STEP_NS) == STEPS * STEP_S


def test_its_size_is_bounded_by_the_hour_however_many_requests_there_are(
    history: RequestHistory,
) -> None:
    for number in range(3 * STEPS):
        now_ns = BEGAN_NS + number * STEP_NS
        for millisecond in range(1, 200, 7):
            history.add("toy:1", now_ns, OutcomeKind.GOOD, millisecond * MS)
    kept = history.of("toy:1", BEGAN_NS + 3 * STEPS * STEP_NS)
    assert len(kept) == STEPS
    assert sum(map(size_of, kept)) <= 256 * STEPS


def size_of(step: HistoryStep) -> int:
    return sys.getsizeof(step) + sum(sys.getsizeof(each) for each in step)


def test_the_model_that_was_quiet_for_longest_makes_room(history: RequestHistory) -> None:
    for number in range(MOST_MODELS):
        history.add(f"m:{number}", BEGAN_NS + number * STEP_NS, OutcomeKind.GOOD, MS)
    now_ns = BEGAN_NS + MOST_MODELS * STEP_NS
    history.add("m:0", now_ns, OutcomeKind.GOOD, MS)
    history.add("m:new", now_ns, OutcomeKind.GOOD, MS)
    assert len(history.models()) == MOST_MODELS
    assert "m:1" not in history.models()
    assert {"m:0", "m:2", "m:new"} <= set(history.models())
