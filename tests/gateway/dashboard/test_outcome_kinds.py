"""What a request's outcome counts as: every reason has a place, and nothing bad can hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary.load import CLIENT_REASONS, REFUSAL_REASONS
from catenary_gateway.observability.generations import ObjectivesReport
from catenary_gateway.observability.outcome_kinds import KINDS, OK, OutcomeKind, kind_of
from catenary_services.errors import CatenaryError, ClientError, OverloadError, QuotaExceeded

MS = 1_000_000


def reasons(kind: type[CatenaryError] = CatenaryError) -> set[str]:
    """Returns the reasons of all errors below a class that name one of their own."""
    found = {kind.reason} if "reason" in vars(kind) else set()
    return found.union(*(reasons(each) for each in kind.__subclasses__()))


def test_every_reason_of_the_tree_of_errors_has_a_kind() -> None:
    assert set(KINDS) == reasons()


def test_clients_have_themselves_to_thank_for_their_errors_and_for_a_spent_quota() -> None:
    theirs = {reason for reason, kind in KINDS.items() if kind is OutcomeKind.CLIENT}
    assert theirs == reasons(ClientError) | {QuotaExceeded.reason}


def test_every_overload_is_a_refusal_but_that_of_a_keys_own_quota() -> None:
    for reason in reasons(OverloadError) - {QuotaExceeded.reason}:
        assert KINDS[reason] is OutcomeKind.REFUSED


def test_bench_counts_as_the_gateway_does() -> None:
    by_kind = {each: {r for r, v in KINDS.items() if v is each} for each in OutcomeKind}
    assert by_kind[OutcomeKind.CLIENT] == CLIENT_REASONS
    assert by_kind[OutcomeKind.REFUSED] == REFUSAL_REASONS


@pytest.mark.parametrize(
    ("outcome", "in_time", "kind"),
    [
        (OK, True, OutcomeKind.GOOD),
        (OK, False, OutcomeKind.LATE),
        ("DEADLINE_EXCEEDED", True, OutcomeKind.LATE),
        ("COMPUTE_FAILED", True, OutcomeKind.LATE),
        ("INTERNAL", True, OutcomeKind.LATE),
        ("OVERLOADED", True, OutcomeKind.REFUSED),
        ("NO_ACTIVE_PLAN", True, OutcomeKind.REFUSED),
        ("INVALID_INPUT", False, OutcomeKind.CLIENT),
        ("QUOTA_EXCEEDED", True, OutcomeKind.CLIENT),
        ("CANCELLED", True, OutcomeKind.CLIENT),
        ("CANCELLED", False, OutcomeKind.LATE),
        ("NEVER_HEARD_OF", True, OutcomeKind.LATE),
    ],
)
def test_a_kind_follows_from_outcome_and_time(
    outcome: str, in_time: bool, kind: OutcomeKind
) -> None:
    assert kind_of(outcome, in_time=in_time) is kind


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
