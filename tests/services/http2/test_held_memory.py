"""Whose connections end because they make a server hold too much."""

from __future__ import annotations

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from catenary_services.http2 import frames
from catenary_services.http2.connection import ServerConnection
from catenary_services.http2.frames import END_HEADERS, PREFACE, frame, settings_frame
from catenary_services.http2.header_blocks import Headers, encoded
from catenary_services.http2.held_memory import UNTAKEN_S, held_bytes, surplus
from catenary_services.http2.limits import MOST_WAITING_STREAMS, ConnectionLimits
from catenary_services.http2.stream import ServerStream
from shared_helpers.raw_http2 import Turns

BLOCK = encoded([(b":path", b"/a")])
NO_WINDOW = PREFACE + settings_frame({frames.INITIAL_WINDOW_SIZE: 0})


class Answering:
    """Answers every call at once with some bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.connection: ServerConnection[Headers] = ServerConnection(
            self, ConnectionLimits(), Turns().budget, lambda: None, 0.0
        )

    def parse(self, headers: Headers) -> Headers:
        return headers

    def opened(self, stream: ServerStream, head: Any, is_whole: bool) -> None:
        self.connection.sending.headers(stream, BLOCK)
        self.connection.sending.data(stream, self._answer)

    def asked(self, calls: int, greeting: bytes = NO_WINDOW) -> ServerConnection[Headers]:
        opened = (frame(frames.HEADERS, END_HEADERS, 2 * at + 1, BLOCK) for at in range(calls))
        self.connection.receive(greeting + b"".join(opened), 0.0)
        while self.connection.has_more:
            self.connection.receive(b"", 0.0)
        return self.connection


def test_answers_count_once_they_have_waited_for_windows() -> None:
    connection = Answering(bytes(1_000)).asked(10)
    assert held_bytes(connection, UNTAKEN_S / 2) == 0
    assert held_bytes(connection, 2 * UNTAKEN_S) >= 10_000


def test_one_answer_may_wait_whatever_its_size_is() -> None:
    assert held_bytes(Answering(bytes(10_000_000)).asked(1), 2 * UNTAKEN_S) == 0


def test_what_is_taken_does_not_count() -> None:
    connection = Answering(bytes(1_000)).asked(10, PREFACE + settings_frame({}))
    assert held_bytes(connection, 2 * UNTAKEN_S) == 0
    assert connection.sending.waiting_streams == 0


def test_what_is_begun_and_not_ended_counts() -> None:
    connection = Answering(b"").asked(0)
    connection.receive(frame(frames.HEADERS, 0, 1, bytes(9_000)), 0.0)
    connection.receive(frame(frames.CONTINUATION, 0, 1, bytes(5_000))[:-1], 0.0)
    assert 14_000 <= held_bytes(connection, 0.0) < 15_000


def test_tables_of_headers_count_what_they_take() -> None:
    connection = Answering(b"").asked(0)
    entries = b"".join(b"\x40\2%02d\0" % at for at in range(90))
    tracemalloc.start()
    try:
        connection.receive(frame(frames.HEADERS, END_HEADERS, 1, BLOCK + entries), 0.0)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 2 < held_bytes(connection, 0.0) < 2 * taken


def test_a_connection_that_is_over_lets_go_of_what_its_peer_said() -> None:
    """It need not wait for the garbage collector, which comes once in thousands of connections."""
    block = frame(frames.HEADERS, 0, 1, bytes(16_000)) + frame(
        frames.CONTINUATION, 0, 1, bytes(16_000)
    )
    half = frame(frames.HEADERS, 0, 1, bytes(16_000))[:-1]
    many = [
        encoded([(b":path", b"/a"), (b"x", bytes([at]) * 1_000)]) + b"\x40\1%c\1y" % at
        for at in range(64, 96)
    ]
    known = [frame(frames.HEADERS, END_HEADERS, 2 * at + 1, each) for at, each in enumerate(many)]
    connections = [Answering(b"").asked(0) for _ in range(60)]
    tracemalloc.start()
    try:
        for at, connection in enumerate(connections):
            connection.receive((block, half, b"".join(known))[at % 3], 0.0)
            while connection.has_more:
                connection.receive(b"", 0.0)
        held, _ = tracemalloc.get_traced_memory()
        for connection in connections:
            connection.end()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held > 20 * (32_000 + 16_000 + 4_000)
    assert left < 60 * 2_000


def test_while_many_answers_wait_further_calls_are_refused() -> None:
    answering = Answering(b"x")
    connection = answering.asked(2 * MOST_WAITING_STREAMS)
    assert connection.sending.waiting_streams == MOST_WAITING_STREAMS + 1
    sent = b"".join(bytes(piece) for piece in connection.sending.take())
    refused = frames.REFUSED_STREAM.to_bytes(4, "big")
    assert sent.count(b"\0\0\x04" + bytes((frames.RST_STREAM, 0))) == MOST_WAITING_STREAMS - 1
    assert refused in sent


SOURCES = st.sampled_from("abc")


@given(st.lists(st.tuples(SOURCES, st.integers(0, 50)), max_size=30), st.integers(0, 100))
def test_what_is_left_of_each_source_fits_and_no_connection_ends_for_nothing(
    held: list[tuple[str, int]], most: int
) -> None:
    ended = surplus(held, most)
    for name in "abc":
        own = [at for at, (source, _) in enumerate(held) if source == name]
        left = [held[at][1] for at in own if at not in ended]
        assert sum(left) <= most
        gone = [held[at][1] for at in own if at in ended]
        if gone:
            assert min(gone) >= max(left, default=0)
            assert sum(left) + min(gone) > most
