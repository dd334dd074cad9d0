"""Extents keep what sessions have written, whatever grows, moves or ends, and waste no row."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from catenary_agent.decoders.cache.extents import Extent, ExtentTable
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS
from catenary_services.errors import Overloaded


class Memory:
    """Rows of numbers, and a table of who has which."""

    def __init__(self, rows: int) -> None:
        self.table = ExtentTable(rows)
        self.cells = np.full(rows, -1)
        self.moved_rows = 0

    def grow(self, extent: Extent, tokens: int) -> None:
        for move in self.table.grow(extent, tokens):
            self.moved_rows += move.tokens * extent.lines
            lines = range(move.extent.lines)
            for line in lines if move.is_down else reversed(lines):
                source = move.source + line * move.source_length
                target = move.target + line * move.target_length
                held = self.cells[source : source + move.tokens].copy()
                self.cells[target : target + move.tokens] = held

    def write(self, extent: Extent, begin: int, values: np.ndarray) -> None:
        """Writes rows of every line from a token on: [lines, tokens]."""
        for line in range(extent.lines):
            first = extent.first + line * extent.length + begin
            self.cells[first : first + values.shape[1]] = values[line]

    def read(self, extent: Extent, tokens: int) -> np.ndarray:
        firsts = extent.first + extent.length * np.arange(extent.lines)
        return self.cells[firsts[:, None] + np.arange(tokens)]


class Sessions(RuleBasedStateMachine):
    """Sessions of several lengths in a small pool, compared with lists of what each has written."""

    @initialize(rows=st.integers(1, 400))
    def begin(self, rows: int) -> None:
        self.memory = Memory(rows)
        self.written: dict[Extent, np.ndarray] = {}
        self.number = 0

    @rule(lines=st.integers(1, 4), most=st.integers(1, 60))
    def open(self, lines: int, most: int) -> None:
        if len(self.written) < 12:
            self.written[Extent(lines, most)] = np.empty((lines, 0), int)

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 11), tokens=st.integers(1, 40))
    def write(self, which: int, tokens: int) -> None:
        extent = list(self.written)[which % len(self.written)]
        before = self.written[extent]
        total = min(before.shape[1] + tokens, extent.most)
        needs = [
            each.room(total if each is extent else content.shape[1])
            for each, content in self.written.items()
        ]
        if sum(needs) > self.memory.table.rows:
            places = [(each.first, each.length) for each in self.written]
            if total > extent.length:
                with pytest.raises(Overloaded):
                    self.memory.grow(extent, total)
            assert places == [(each.first, each.length) for each in self.written]
            return
        self.memory.grow(extent, total)
        new = self.number + np.arange(extent.lines * (total - before.shape[1]))
        self.number += len(new)
        new = new.reshape(extent.lines, -1)
        self.memory.write(extent, before.shape[1], new)
        self.written[extent] = np.concatenate((before, new), 1)

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 11), tokens=st.integers(0, 40))
    def truncate(self, which: int, tokens: int) -> None:
        extent = list(self.written)[which % len(self.written)]
        self.memory.table.shrink(extent, tokens)
        self.written[extent] = self.written[extent][:, :tokens]

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 11))
    def close(self, which: int) -> None:
        extent = list(self.written)[which % len(self.written)]
        self.memory.table.release(extent)
        del self.written[extent]

    @invariant()
    def what_was_written_is_there(self) -> None:
        if hasattr(self, "memory"):
            self.memory.table.validate()
            for extent, content in self.written.items():
                assert np.array_equal(self.memory.read(extent, content.shape[1]), content)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("fill", "sessions", "most_moved"), [(0.5, 1_000, 2), (0.9, 10_000, 150), (1.0, 1_000, 1_000)]
)
def test_thousands_of_sessions_come_and_go_without_a_lost_row(
    fill: float, sessions: int, most_moved: int
) -> None:
    rows, lines, source = 60_000, 3, random.Random(7)
    memory, running, lengths = Memory(rows), dict[Extent, int](), dict[Extent, int]()
    begun = ended = written = 0
    contents: dict[Extent, np.ndarray] = {}

    def needed() -> int:
        return sum(each.room(tokens) for each, tokens in running.items())

    def write(extent: Extent, tokens: int) -> None:
        nonlocal written
        memory.grow(extent, tokens)
        before = contents.get(extent, np.empty((lines, 0), int))
        new = written + np.arange(lines * (tokens - before.shape[1])).reshape(lines, -1)
        written += new.size
        memory.write(extent, before.shape[1], new)
        contents[extent] = np.concatenate((before, new), 1)
        running[extent] = tokens

    def end(extent: Extent) -> None:
        nonlocal ended
        assert np.array_equal(memory.read(extent, running[extent]), contents.pop(extent))
        memory.table.release(extent)
        del running[extent]
        ended += 1

    while ended < sessions:
        while needed() < fill * rows:
            extent = Extent(lines, 600)
            prompt = source.randint(1, 300)
            if needed() + extent.room(prompt) > rows:
                break
            lengths[extent] = min(600, prompt + source.choice((10, 60, 290)))
            write(extent, prompt)
            begun += 1
        for extent in list(running):
            if extent not in running:
                continue
            tokens = min(running[extent] + 16, lengths[extent])
            while needed() - extent.room(running[extent]) + extent.room(tokens) > rows:
                youngest = list(running)[-1]
                end(youngest)  # as an agent does whose memory is full
                if youngest is extent:
                    break
            if extent in running and tokens == running[extent]:
                end(extent)
            elif extent in running:
                write(extent, tokens)
        memory.table.validate()
    assert memory.moved_rows < most_moved * written


def test_with_memory_to_spare_nothing_ever_moves() -> None:
    memory = Memory(4_000)
    extents = [Extent(2, 200) for _ in range(5)]
    for tokens in range(1, 201, 7):
        for extent in extents:
            memory.grow(extent, tokens)
    assert memory.moved_rows == 0
    assert all(each.length == 200 for each in extents)


def test_the_last_row_can_be_used_and_not_one_more() -> None:
    table = ExtentTable(3 * 48)
    extents = [Extent(1, 60) for _ in range(4)]
    for extent in extents[:3]:
        table.grow(extent, 33)
    assert sum(each.rows for each in extents) == table.rows
    with pytest.raises(Overloaded, match="144 rows, and 160 are needed"):
        table.grow(extents[3], 1)
    table.shrink(extents[0], CACHE_BLOCK_TOKENS)
    table.grow(extents[3], 2 * CACHE_BLOCK_TOKENS)
    assert sum(each.rows for each in extents) == table.rows
    table.validate()
