"""What a load has added to the process ends up in huge pages."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.decoders.onnx.huge_pages import added, in_huge_pages

Range = tuple[int, int]


def ranges(marks: set[int]) -> list[Range]:
    """Ascending ranges without overlap from a set of small numbers."""
    points = sorted(marks)
    return [(a, b) for a, b in zip(points[::2], points[1::2], strict=False)]


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_what_was_added_is_what_is_there_now_and_was_not_before(a: set[int], b: set[int]) -> None:
    before, after = ranges(a), ranges(b)

    def covered(parts: list[Range]) -> set[int]:
        return {point for first, last in parts for point in range(first, last)}

    parts = added(before, after)
    assert covered(parts) == covered(after) - covered(before)
    assert parts == sorted(parts)
    assert all(first < last for first, last in parts)


def huge_kilobytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(each) for each in re.findall(r"AnonHugePages:\s+(\d+)", rollup))


def touched(megabytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * (megabytes << 20))
    return memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are Linux's")
def test_memory_of_a_load_is_put_into_huge_pages() -> None:
    if "never" in re.findall(r"\[(\w+)\]", _mode()):
        pytest.skip("transparent huge pages are switched off on this machine")
    if not _kernel_collapses():
        pytest.skip("this kernel has no huge pages to give, or gives them in its own time")
    before = huge_kilobytes()
    memory = in_huge_pages(lambda: touched(32))
    try:
        assert huge_kilobytes() - before >= 24 << 10
        assert memory[0] == memory[-1] == 1
    finally:
        memory.close()


def _mode() -> str:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return file.read_text() if file.exists() else "[never]"


def _kernel_collapses() -> bool:
    """Asks by another way than the code under test."""
    memory = touched(32)
    try:
        memory.madvise(25)  # MADV_COLLAPSE
    except OSError:
        return False
    else:
        return True
    finally:
        memory.close()
