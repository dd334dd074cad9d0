from __future__ import annotations

from dataclasses import replace

from catenary_gateway.generation.request import FIRST_TOKEN_NS, AnswerLimits, limits_of
from catenary_gateway.inference import LONGEST_BUDGET_NS

S = 1_000_000_000
FREE = AnswerLimits(whole_ns=3600 * S, first_token_ns=10 * S, silence_ns=5 * S)


def test_before_its_first_token_an_answer_is_due_at_its_first_token() -> None:
    assert FREE.due_ns(0) == 10 * S


def test_every_token_gives_it_more_time() -> None:
    assert FREE.due_ns(9 * S) == 14 * S
    assert FREE.due_ns(1000 * S) == 1005 * S


def test_a_time_for_the_whole_answer_ends_all_of_it() -> None:
    asked = replace(FREE, whole_ns=12 * S)
    assert asked.due_ns(0) == 10 * S
    assert asked.due_ns(9 * S) == 12 * S
    assert "deadline passed" in asked.stage_at(12 * S, 9 * S)


def test_the_reason_names_the_limit() -> None:
    assert "no first token" in FREE.stage_at(10 * S, 0)
    assert "no token came for 5 s" in FREE.stage_at(14 * S, 9 * S)


class Said:
    """A request's terms and its model, as far as limits look at them."""

    def __init__(self, deadline_ns: int | None = None, slo_ns: int = 0, ttft_ns: int = 0) -> None:
        self.deadline_ns, self.time_to_first_token_ns = deadline_ns, ttft_ns or None
        self.default_slo_ns = slo_ns
        self.options = self.model = self


class Came:
    def __init__(self, budget_ns: int | None = None) -> None:
        self.monotonic_ns, self.budget_ns = 100 * S, budget_ns


def test_nobody_asked_for_a_deadline_so_there_is_none() -> None:
    limits = limits_of(Said(slo_ns=20 * S), Came(), 5 * S)  # type: ignore[arg-type]
    assert limits.whole_ns == 100 * S + LONGEST_BUDGET_NS
    assert limits.first_token_ns == 120 * S
    assert limits_of(Said(), Came(), 1).first_token_ns == 100 * S + FIRST_TOKEN_NS  # type: ignore[arg-type]


def test_the_least_of_what_was_said_is_the_deadline() -> None:
    limits = limits_of(Said(deadline_ns=9 * S), Came(budget_ns=7 * S), 5 * S)  # type: ignore[arg-type]
    assert limits.whole_ns == 107 * S


def test_a_patient_objective_for_the_first_token_is_waited_for() -> None:
    limits = limits_of(Said(slo_ns=20 * S, ttft_ns=30 * S), Came(), 5 * S)  # type: ignore[arg-type]
    assert limits.first_token_ns == 130 * S
