"""What counts as right, and when everything is as before."""

from __future__ import annotations

import pytest

import catenary_services.errors
from faults.judge import (
    IMAGE,
    IN_A_ROW,
    RETRYABLE,
    STATED,
    TEXT,
    Outcome,
    Spell,
    Verdict,
    lost_in_calm,
    recovery_s,
)

NORMAL_S = {IMAGE: 1.0, TEXT: 1.0}


def outcome(sent_s: float = 0.0, took_s: float = 0.1, **facts: object) -> Outcome:
    facts.setdefault("right", True)
    return Outcome(str(facts.pop("kind", IMAGE)), sent_s, sent_s + took_s, **facts)  # type: ignore[arg-type]


def spell(began_s: float, undone_s: float, *, served_s: float | None = None) -> Spell:
    return Spell(1, ("cut",), "cut", 5.0, served_s, began_s, undone_s, recovered_s=1.0, whole_s=2.0)


def both(*moments: float) -> list[Outcome]:
    return [outcome(at, kind=kind) for at in moments for kind in (IMAGE, TEXT)]


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, Verdict.RIGHT),
        ({"right": False}, Verdict.WRONG),
        ({"hung": True}, Verdict.HUNG),
        ({"cancelled": True}, Verdict.CANCELLED),
        ({"cancelled": True, "right": False}, Verdict.WRONG),
        ({"reason": "UNAVAILABLE", "retryable": True}, Verdict.REFUSED),
        ({"reason": "UNAVAILABLE"}, Verdict.NOT_RETRYABLE),
        ({"reason": "DEADLINE_EXCEEDED"}, Verdict.REFUSED),
        ({"reason": "INTERNAL", "message": "internal error, id 5"}, Verdict.UNTYPED),
        (
            {"reason": "UNAVAILABLE", "retryable": True, "message": "Stream removed"},
            Verdict.UNTYPED,
        ),
        # A gateway that was killed says nothing; the code says that repeating helps.
        (
            {
                "reason": "UNAVAILABLE",
                "retryable": True,
                "message": "Stream removed (recvmsg:Connection reset by peer (104))",
            },
            Verdict.REFUSED,
        ),
        ({"reason": "INVALID_INPUT"}, Verdict.UNTYPED),
        ({"reason": "KeyError", "foreign": True}, Verdict.UNTYPED),
        # What came of a stream before its error was wrong already.
        ({"reason": "UNAVAILABLE", "retryable": True, "right": False}, Verdict.WRONG),
    ],
)
def test_a_request_is_judged_by_its_end(facts: dict[str, object], verdict: Verdict) -> None:
    assert outcome(**facts).verdict is verdict


def test_stated_errors_are_those_of_the_platform() -> None:
    known = {
        cls.reason for cls in vars(catenary_services.errors).values() if hasattr(cls, "reason")
    }
    assert known >= STATED
    assert RETRYABLE <= STATED


def test_recovery_is_the_first_of_some_good_answers_in_a_row() -> None:
    found = recovery_s(both(10.0, 10.5, 11.0, 11.5), 10.0, NORMAL_S)
    assert found == pytest.approx(0.1)


def test_an_error_begins_the_row_anew() -> None:
    answers = [*both(10.0, 10.5), outcome(11.0, reason="UNAVAILABLE"), *both(12.0, 12.5, 13.0)]
    assert recovery_s(answers, 10.0, NORMAL_S) == pytest.approx(2.1)


def test_a_slow_answer_is_not_as_usual() -> None:
    answers = [*both(10.0), outcome(10.2, 3.0), *both(14.0, 14.5, 15.0)]
    assert recovery_s(answers, 10.0, NORMAL_S) == pytest.approx(4.1)


def test_both_kinds_have_to_recover() -> None:
    images = [outcome(10.0 + n) for n in range(IN_A_ROW)]
    assert recovery_s(images, 10.0, NORMAL_S) is None
    texts = [outcome(20.0 + n, kind=TEXT) for n in range(IN_A_ROW)]
    assert recovery_s(images + texts, 10.0, NORMAL_S) == pytest.approx(10.1)


def test_what_was_sent_before_the_end_of_the_fault_and_what_we_gave_up_do_not_count() -> None:
    answers = both(9.0, 9.1, 9.2, 9.3, 12.0, 12.1)
    answers.append(outcome(12.05, cancelled=True))
    assert recovery_s(answers, 10.0, NORMAL_S) is None
    assert recovery_s([*answers, *both(12.2)], 10.0, NORMAL_S) == pytest.approx(2.1)


def test_a_refusal_outside_of_any_fault_is_lost_in_calm() -> None:
    refused = [outcome(at, reason="UNAVAILABLE", retryable=True) for at in (4.0, 10.5, 30.0)]
    # The spell lasts until everything is as before, two seconds after its end.
    assert lost_in_calm(refused, [spell(10.0, 12.0)]) == [refused[0], refused[2]]


def test_a_request_that_was_under_way_when_the_fault_began_belongs_to_it() -> None:
    refused = outcome(9.0, 3.0, reason="UNAVAILABLE", retryable=True)
    assert lost_in_calm([refused], [spell(10.0, 12.0)]) == []


def test_what_is_served_in_spite_of_a_fault_may_not_be_refused() -> None:
    refused = [outcome(at, reason="UNAVAILABLE", retryable=True) for at in (10.5, 12.5, 16.0)]
    promised = spell(10.0, 15.0, served_s=2.0)
    assert promised.refused_against_promise(refused) == [refused[1]]
    assert spell(10.0, 15.0).refused_against_promise(refused) == []


def test_a_fault_that_never_ended_covers_all_that_comes_later() -> None:
    endless = spell(10.0, 12.0)
    endless.recovered_s = None
    assert endless.is_late
    assert lost_in_calm([outcome(500.0, reason="UNAVAILABLE", retryable=True)], [endless]) == []
