"""Progress of fetching, and what makes way for what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.content.record import FETCHED_FOLDER
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import PlanInfeasible
from catenary_services.store import kept
from catenary_services.store.progress import ProgressCounter
from catenary_services.store.room import StoreLimit

KEY = ModelKey("net", "1")
SECOND = 1_000_000_000
MB = 1 << 20


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_what_came_adds_up_and_the_rate_is_that_of_the_last_seconds(pieces: list[int]) -> None:
    counter = ProgressCounter()
    counter.wanted(KEY, sum(pieces), 0)
    for number, nbytes in enumerate(pieces, 1):
        counter.came(KEY, nbytes, number * SECOND)
    now = len(pieces) * SECOND
    (progress,) = counter.all(now)
    assert progress.wanted_bytes == progress.fetched_bytes == sum(pieces) == counter.total_bytes
    recent = pieces[-6:] if len(pieces) >= 6 else pieces
    assert progress.bytes_per_s <= sum(recent)


def test_a_version_that_is_complete_is_forgotten_soon_and_one_that_waits_is_not() -> None:
    counter = ProgressCounter()
    counter.wanted(KEY, 10, 0)
    counter.came(KEY, 4, SECOND)
    assert counter.all(60 * SECOND)[0].bytes_per_s == 0
    counter.came(KEY, 6, 61 * SECOND)
    assert len(counter.all(62 * SECOND)) == 1
    assert counter.all(70 * SECOND) == []


def version(root: Path, name: str, used_s: float) -> Path:
    folder = root / name / "1"
    (folder / FETCHED_FOLDER).mkdir(parents=True)
    (folder / "weights").write_bytes(os.urandom(MB))
    users = folder / FETCHED_FOLDER / "users"
    users.touch()
    os.utime(users, (used_s, used_s))
    return folder


def test_the_least_recently_used_version_goes_first(tmp_path: Path) -> None:
    folders = [version(tmp_path, name, used) for name, used in (("b", 20), ("a", 30), ("c", 10))]
    room = StoreLimit(tmp_path, 3 * MB + MB // 2, 0)
    room.make(MB)
    assert [folder.exists() for folder in folders] == [True, True, False]
    room.make(2 * MB)
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_what_is_in_use_stays_and_what_somebody_else_put_there_is_not_counted(
    tmp_path: Path,
) -> None:
    used, other = version(tmp_path, "used", 1), version(tmp_path, "other", 2)
    own = tmp_path / "own" / "1"
    own.mkdir(parents=True)
    (own / "weights").write_bytes(os.urandom(4 * MB))
    handle = kept.use(used)
    room = StoreLimit(tmp_path, 2 * MB + MB // 2, 0)
    room.make(MB)
    assert used.exists()
    assert own.exists()
    assert not other.exists()
    with pytest.raises(PlanInfeasible, match="are taken by versions in use"):
        room.make(2 * MB)
    os.close(handle)
    room.make(2 * MB)
    assert not used.exists()


def test_a_disk_without_space_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match="bytes free, of which 64 are left to others"):
        StoreLimit(tmp_path, 0, 64).make(1 << 60)


def test_what_a_crash_has_left_of_a_dropped_version_goes(tmp_path: Path) -> None:
    left = tmp_path / "net" / ".dropped-1-77-5"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"x")
    kept.sweep(tmp_path / "net")
    assert not left.exists()
