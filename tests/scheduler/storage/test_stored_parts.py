"""How parts of a leader are written and taken over, whoever they are."""

from __future__ import annotations

from typing import Any

import pytest

from catenary_scheduler.book import Book
from catenary_scheduler.leadership.recovery import RestoreStep, restoring, take_over
from catenary_scheduler.leadership.snapshot import SnapshotWriter
from catenary_scheduler.storage.book_records import BookRecords
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_services.errors import InvalidInput


class Part:
    """A part that is compared with what was written of it before."""

    def __init__(self, table: RedisTable, **fields: str) -> None:
        self.table = table
        self.fields: Fields = {**fields}

    def records(self) -> Fields:
        return dict(self.fields)

    def restore(self, stored: str) -> list[str] | None:
        if stored == "bad":
            raise ValueError(stored)
        self.fields["restored"] = stored
        return ["not all of it"] if stored == "half" else None


def test_parts_may_share_a_table_and_only_what_changed_is_written() -> None:
    plan, scaling = Part(RedisTable.PLAN, active="one"), Part(RedisTable.PLAN, scaling="two")
    agents, journal = Part(RedisTable.AGENTS, a="here"), Journal()
    persistence = SnapshotWriter(journal, BookRecords(Book()), (), (plan, scaling, agents))
    changes = persistence.snapshot()
    assert changes.replace
    assert changes.tables[RedisTable.PLAN] == {"active": "one", "scaling": "two"}
    assert changes.tables[RedisTable.AGENTS] == {"a": "here"}
    scaling.fields = {"scaling": "three"}
    agents.fields = {}
    persistence.collect()
    assert not journal  # nobody said that anything changed
    persistence.changed()
    persistence.collect()
    assert journal.take().tables == {
        RedisTable.PLAN: {"scaling": "three"},
        RedisTable.AGENTS: {"a": None},
    }


async def test_a_part_that_cannot_be_restored_begins_empty_and_is_said() -> None:
    stored: Any = None
    first, second, third = (Part(RedisTable.PEERS) for _ in range(3))
    steps = [
        restoring("first", first, lambda _: "bad"),
        restoring("second", second, lambda _: "half"),
        restoring("third", third, lambda _: "whole"),
    ]
    assert await take_over(steps, stored) == ["first: ValueError: bad", "not all of it"]
    assert (first.fields, third.fields) == ({}, {"restored": "whole"})


async def test_what_is_wrong_with_our_own_settings_passes_on() -> None:
    stored: Any = None

    async def fails(_: object) -> None:
        raise InvalidInput("plan_file", "is no plan")

    with pytest.raises(InvalidInput, match="is no plan"):
        await take_over([RestoreStep("plan file", fails, must_work=True)], stored)
    assert await take_over([RestoreStep("plan", fails)], stored) != []
