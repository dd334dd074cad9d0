"""Maps of chunks: ranges to chunks, what survives, who may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.content.record import FileRecord
from catenary_services.store.chunk_map import ChunkMap, chunk_span, chunks_of
from catenary_services.store.kept import chunks_between
from small_models.store_world import CHUNK, chunks_of_64_kib

DIGEST = "0" * 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of_64_kib(monkeypatch)


def recorded(size: int) -> FileRecord:
    count = -(-size // CHUNK) if size > CHUNK else 0
    return FileRecord(size, DIGEST, chunks=(DIGEST,) * count)


def mapped(folder: Path, size: int) -> ChunkMap:
    made = ChunkMap(folder / "m.map", folder / "file", recorded(size))
    made.create()
    return made


sizes = st.integers(0, 9 * CHUNK + 3)


class TestRanges:
    @given(sizes)
    def test_chunks_follow_each_other_and_end_with_the_file(self, size: int) -> None:
        spans = [chunk_span(recorded(size), each) for each in range(chunks_of(recorded(size)))]
        at = 0
        for offset, length in spans:
            assert offset == at
            at += length
        assert at == size
        assert size == 0 or all(length > 0 for _, length in spans)

    @given(sizes, st.integers(0, 10 * CHUNK), st.integers(1, 3 * CHUNK))
    def test_a_range_has_the_chunks_of_its_bytes(self, size: int, offset: int, length: int) -> None:
        file = recorded(size)
        found = set(chunks_between(file, offset, length))
        last = min(offset + length, size) - 1
        for chunk in range(chunks_of(file)):
            begin, count = chunk_span(file, chunk)
            has_bytes = begin <= last and offset < begin + count
            assert (chunk in found) == has_bytes


def test_what_was_written_is_here_for_the_next_process(tmp_path: Path) -> None:
    first = mapped(tmp_path, 4 * CHUNK)
    first.write(2, b"x" * CHUNK)
    again = mapped(tmp_path, 4 * CHUNK)
    assert again.here() == [2]
    assert [again.is_here(each) for each in range(4)] == [False, False, True, False]
    assert (tmp_path / "file").stat().st_size == 4 * CHUNK
    again.forget(2)
    assert first.here() == []


def test_a_crash_before_the_mark_leaves_the_chunk_missing(tmp_path: Path) -> None:
    known = mapped(tmp_path, 4 * CHUNK)
    known.write(0, b"a" * CHUNK)
    with (tmp_path / "file").open("r+b") as file:  # as far as a process came that was killed
        file.seek(CHUNK)
        file.write(b"b" * CHUNK)
    assert known.here() == [0]
    known.write(1, b"b" * CHUNK)
    assert known.here() == [0, 1]


def test_a_chunk_of_another_length_is_not_written(tmp_path: Path) -> None:
    known = mapped(tmp_path, 2 * CHUNK + 7)
    with pytest.raises(ValueError, match="bytes for a chunk"):
        known.write(2, b"12345678")
    known.write(2, b"1234567")
    assert known.here() == [2]


def test_one_claim_at_a_time_and_none_in_the_way_of_other_chunks(tmp_path: Path) -> None:
    one, two = mapped(tmp_path, 4 * CHUNK), mapped(tmp_path, 4 * CHUNK)
    with one.claimed(1) as first, two.claimed(1) as second, two.claimed(2) as third:
        assert (first, second, third) == (True, False, True)
        two.write(1, b"c" * CHUNK)  # a claim keeps nobody from writing
    with two.claimed(1) as free:
        assert free


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    known = mapped(tmp_path, 4 * CHUNK)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with known.claimed(3) as mine:
            os.write(writer, b"1" if mine else b"0")
            os._exit(0)  # as if it were killed
    assert os.read(reader, 1) == b"1"
    os.waitpid(child, 0)
    with known.claimed(3) as free:
        assert free


def test_own_writes_keep_the_state_and_those_of_others_change_it(tmp_path: Path) -> None:
    known = mapped(tmp_path, 4 * CHUNK)
    before = known.state()
    for chunk in range(3):
        known.write(chunk, b"x" * CHUNK)
    assert known.state() == before
    with (tmp_path / "file").open("r+b") as file:
        file.write(b"somebody else")
    os.utime(tmp_path / "file", ns=(1, 1))  # times are coarse: a change of a moment ago shows
    known.write(3, b"x" * CHUNK)
    assert known.state() != before


def test_a_file_that_was_replaced_has_another_state(tmp_path: Path) -> None:
    known = mapped(tmp_path, 2 * CHUNK)
    before = known.state()
    (tmp_path / "other").write_bytes(bytes(2 * CHUNK))
    (tmp_path / "other").replace(tmp_path / "file")
    assert known.state() != before
