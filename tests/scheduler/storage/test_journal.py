from __future__ import annotations

from catenary_scheduler.storage.journal import Changes, Journal
from catenary_scheduler.storage.keys import Table


def test_a_field_written_twice_is_flushed_once() -> None:
    journal = Journal()
    journal.put(Table.PLAN, "a", "1")
    journal.put(Table.PLAN, "a", None)
    changes = journal.take()
    assert changes.tables == {Table.PLAN: {"a": None}}
    assert len(changes) == 1
    assert not journal


def test_overflow_asks_for_a_snapshot_and_holds_nothing() -> None:
    journal = Journal(limit=3)
    for number in range(10):
        journal.put(Table.BATCHES, str(number), "x")
    assert journal.needs_snapshot
    assert len(journal) == 0
    journal.snapshot_taken()
    journal.event("later", {})
    assert not journal.needs_snapshot
    assert journal.take().events == [{"kind": "later"}]


def test_newer_values_win_over_a_batch_put_back() -> None:
    journal = Journal()
    journal.put(Table.PLAN, "a", "old")
    journal.put(Table.PLAN, "b", "old")
    failed = journal.take()
    journal.put(Table.PLAN, "a", "new")
    journal.put_back(failed)
    assert journal.take().tables == {Table.PLAN: {"a": "new", "b": "old"}}


def test_put_back_beyond_the_limit_asks_for_a_snapshot() -> None:
    journal = Journal(limit=2)
    journal.put(Table.PLAN, "a", "1")
    journal.put(Table.PLAN, "b", "1")
    failed = journal.take()
    journal.put(Table.PLAN, "c", "1")
    journal.put_back(failed)
    assert journal.needs_snapshot


def test_a_snapshot_that_did_not_arrive_is_taken_anew() -> None:
    journal = Journal()
    journal.put_back(Changes({Table.PLAN: {"a": "1"}}, replace=True))
    assert journal.needs_snapshot
