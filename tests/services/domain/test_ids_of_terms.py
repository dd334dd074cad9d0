"""Ids of batches and sessions: which a leader, or one before it, can have given out."""

from __future__ import annotations

from catenary_services.domain.groups import first_id, may_be_given_out

WRAPPED = (1 << 23) + 1


def test_ids_up_to_the_next_one_may_be_given_out() -> None:
    following = first_id(7) + 10
    assert may_be_given_out(following - 1, following, 7)
    assert may_be_given_out(first_id(6) + 1000, following, 7)
    assert not may_be_given_out(following, following, 7)
    assert not may_be_given_out(first_id(8), following, 7)


def test_of_predecessors_ids_nothing_is_said_once_ids_have_begun_again() -> None:
    following = first_id(WRAPPED) + 10
    assert following < first_id(100)
    assert may_be_given_out(first_id(100), following, WRAPPED)
    assert may_be_given_out(following - 1, following, WRAPPED)
    assert not may_be_given_out(following, following, WRAPPED)
