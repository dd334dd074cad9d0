from __future__ import annotations

from catenary_scheduler.storage.journal import Journal, JournalChanges
from catenary_scheduler.storage.keys import RedisTable


def test_a_field_written_twice_is_flushed_once() -> None:
    journal = Journal()
    journal.put(RedisTable.PLAN, "a", "1")
    journal.put(RedisTable.PLAN, "a", None)
    changes = journal.take()
    assert changes.tables == {RedisTable.PLAN: {"a": None}}
    assert len(changes) == 1
    assert not journal


def test_overflow_asks_for_a_snapshot_and_holds_nothing() -> None:
    journal = Journal(limit=3)
    for number in range(10):
        journal.put(RedisTable.BATCHES, str(number), "x")
    assert journal.needs_snapshot
    assert len(journal) == 0
    journal.snapshot_taken()
    journal.event("later", {})
    assert not journal.needs_snapshot
    assert journal.take().events == [{"kind": "later"}]


def test_newer_values_win_over_a_batch_put_back() -> None:
    journal = Journal()
    journal.put(RedisTable.PLAN, "a", "old")
    journal.put(RedisTable.PLAN, "b", "old")
    failed = journal.take()
    journal.put(RedisTable.PLAN, "a", "new")
    journal.put_back(failed)
    assert journal.take().tables == {RedisTable.PLAN: {"a": "new", "b": "old"}}


def test_put_back_beyond_the_limit_asks_for_a_snapshot() -> None:
    journal = Journal(limit=2)
    journal.put(RedisTable.PLAN, "a", "1")
    journal.put(RedisTable.PLAN, "b", "1")
    failed = journal.take()
    journal.put(RedisTable.PLAN, "c", "1")
    journal.put_back(failed)
    assert journal.needs_snapshot


def test_a_snapshot_that_did_not_arrive_is_taken_anew() -> None:
    journal = Journal()
    journal.put_back(JournalChanges({RedisTable.PLAN: {"a": "1"}}, replace=True))
    assert journal.needs_snapshot
