"""What a request's outcome counts as: every reason has a place, and nothing bad can hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary.load import CLIENT_REASONS, REFUSAL_REASONS
from catenary_gateway.observability.generations import ObjectivesReport
from catenary_gateway.observability.verdicts import OK, VERDICTS, Verdict, verdict_of
from catenary_services.errors import CatenaryError, ClientError, OverloadError, QuotaExceeded

MS = 1_000_000


def reasons(kind: type[CatenaryError] = CatenaryError) -> set[str]:
    """Returns the reasons of all errors below a class that name one of their own."""
    found = {kind.reason} if "reason" in vars(kind) else set()
    return found.union(*(reasons(each) for each in kind.__subclasses__()))


def test_every_reason_of_the_tree_of_errors_has_a_verdict() -> None:
    assert set(VERDICTS) == reasons()


def test_clients_have_themselves_to_thank_for_their_errors_and_for_a_spent_quota() -> None:
    theirs = {reason for reason, verdict in VERDICTS.items() if verdict is Verdict.CLIENT}
    assert theirs == reasons(ClientError) | {QuotaExceeded.reason}


def test_every_overload_is_a_refusal_but_that_of_a_keys_own_quota() -> None:
    for reason in reasons(OverloadError) - {QuotaExceeded.reason}:
        assert VERDICTS[reason] is Verdict.REFUSED


def test_bench_counts_as_the_gateway_does() -> None:
    by_verdict = {each: {r for r, v in VERDICTS.items() if v is each} for each in Verdict}
    assert by_verdict[Verdict.CLIENT] == CLIENT_REASONS
    assert by_verdict[Verdict.REFUSED] == REFUSAL_REASONS


@pytest.mark.parametrize(
    ("outcome", "in_time", "verdict"),
    [
        (OK, True, Verdict.GOOD),
        (OK, False, Verdict.LATE),
        ("DEADLINE_EXCEEDED", True, Verdict.LATE),
        ("COMPUTE_FAILED", True, Verdict.LATE),
        ("INTERNAL", True, Verdict.LATE),
        ("OVERLOADED", True, Verdict.REFUSED),
        ("NO_ACTIVE_PLAN", True, Verdict.REFUSED),
        ("INVALID_INPUT", False, Verdict.CLIENT),
        ("QUOTA_EXCEEDED", True, Verdict.CLIENT),
        ("CANCELLED", True, Verdict.CLIENT),
        ("CANCELLED", False, Verdict.LATE),
        ("NEVER_HEARD_OF", True, Verdict.LATE),
    ],
)
def test_a_verdict_follows_from_outcome_and_time(
    outcome: str, in_time: bool, verdict: Verdict
) -> None:
    assert verdict_of(outcome, in_time=in_time) is verdict


def test_an_answer_that_was_given_up_is_overdue_once_it_has_missed_an_objective() -> None:
    report = ObjectivesReport(200 * MS, 50 * MS, 0, 0, 0, 0, complete=False)
    assert not report.is_overdue(200 * MS)
    assert report.is_overdue(201 * MS)
    begun = replace(report, first_token_ns=150 * MS)
    assert not begun.is_overdue(900 * MS)
    assert not replace(begun, per_token_ns=50 * MS).is_overdue(900 * MS)
    assert replace(begun, per_token_ns=51 * MS).is_overdue(900 * MS)
    assert replace(report, first_token_ns=201 * MS).is_overdue(0)
    free = ObjectivesReport(0, 0, 0, 0, 0, 0, complete=False)
    assert not free.is_overdue(10**12)
