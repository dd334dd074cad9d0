"""The state machine of a connection: what arrives, however it is cut, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.http2 import frames
from catenary_services.http2.connection import ServerConnection
from catenary_services.http2.flood_limit import TurnBudget, TurnQueue
from catenary_services.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    PREFACE,
    ConnectionViolation,
    StreamViolation,
    frame,
    settings_frame,
    window_frame,
)
from catenary_services.http2.header_blocks import HeaderDecoder, Headers, encoded
from catenary_services.http2.limits import (
    BLOCK_BYTES,
    FRAMES_AT_ONCE,
    FRAMES_PER_WORK,
    PASSING_BLOCK_BYTES,
    SHORT_BLOCK_BYTES,
    WORK_AT_ONCE,
    ConnectionLimits,
)
from catenary_services.http2.stream import ServerStream
from shared_helpers.raw_http2 import GREETING, Frame, Turns, data

PLAIN = encoded([(b":path", b"/a"), (b"x", b"y")])


class Receiver:
    """Notes what becomes of one stream."""

    def __init__(self, heard: list[Any], number: int) -> None:
        self._heard = heard
        self._number = number

    def on_data(self, data: bytes, begin: int, end: int, is_last: bool) -> None:
        self._heard.append(("data", self._number, data[begin:end], is_last))

    def on_reset(self) -> None:
        self._heard.append(("reset", self._number))

    def on_drained(self) -> None:
        self._heard.append(("drained", self._number))


class Opener:
    """Takes every stream, and notes what happens."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.streams: dict[int, ServerStream] = {}
        self.parsed = 0

    def parse(self, headers: Headers) -> tuple[tuple[bytes, bytes], ...] | StreamViolation:
        self.parsed += 1
        if any(name == b"bad" for name, _ in headers):
            return StreamViolation(frames.PROTOCOL_ERROR, "bad")
        return tuple(headers)

    def opened(self, stream: ServerStream, head: Any, is_whole: bool) -> None:
        self.heard.append(("opened", stream.number, head, is_whole))
        self.streams[stream.number] = stream
        stream.receiver = Receiver(self.heard, stream.number)


class Side:
    """A server's side that takes bytes and tells what it sends."""

    def __init__(
        self,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
        turns: Turns | None = None,
    ) -> None:
        self.opener = Opener()
        self.turns = turns or Turns()
        self.connection: ServerConnection[Any] = ServerConnection(
            self.opener, limits, self.turns.budget, lambda: None, 0.0
        )
        self.sending = self.connection.sending
        self.sending.take()

    def take(self, *pieces: bytes, now_s: float = 0.0) -> list[Any]:
        """Takes bytes; returns what was heard of them."""
        before = len(self.opener.heard)
        self.connection.receive(b"".join(pieces), now_s)
        while self.connection.has_more:
            self.turns.next()
            self.connection.receive(b"", now_s)
        self.turns.next()
        return self.opener.heard[before:]

    def read(self, data: bytes = b"") -> list[int]:
        """Takes bytes within one turn; returns the streams that were opened."""
        before = len(self.opener.heard)
        self.connection.receive(data, 0.0)
        return [each[1] for each in self.opener.heard[before:] if each[0] == "opened"]

    def sent(self) -> list[Frame]:
        """Returns the frames that were sent since the last time."""
        out = b"".join(bytes(piece) for piece in self.sending.take())
        found = []
        while out:
            size = int.from_bytes(out[:3], "big")
            number = int.from_bytes(out[5:9], "big")
            found.append(Frame(out[3], out[4], number, out[9 : 9 + size]))
            out = out[9 + size :]
        return found


@pytest.fixture
def side() -> Side:
    made = Side()
    made.take(GREETING)
    made.sent()
    return made


def headers(number: int, block: bytes = PLAIN, flags: int = END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, number, block)


def test_a_call_is_heard_in_order(side: Side) -> None:
    heard = side.take(headers(1), data(1, b"abc"), data(1, b"", ends=True))
    head = ((b":path", b"/a"), (b"x", b"y"))
    assert heard == [
        ("opened", 1, head, False),
        ("data", 1, b"abc", False),
        ("data", 1, b"", True),
    ]


def test_settings_come_first_and_are_acknowledged() -> None:
    side = Side()
    side.take(PREFACE, settings_frame({frames.INITIAL_WINDOW_SIZE: 10}))
    assert [(each.kind, each.flags) for each in side.sent()] == [(frames.SETTINGS, ACK)]
    assert side.sending.stream_window == 10


HELLO = settings_frame({})
REFUSED: dict[str, tuple[bytes, int]] = {
    "another preface": (b"GET / HTTP/1.1\r\n\r\n", frames.PROTOCOL_ERROR),
    "no settings": (PREFACE + frame(frames.PING, 0, 0, bytes(8)), frames.PROTOCOL_ERROR),
    "headers before settings": (PREFACE + headers(1), frames.PROTOCOL_ERROR),
    "settings of a stream": (PREFACE + frame(4, 0, 1), frames.PROTOCOL_ERROR),
    "settings of an odd length": (GREETING + frame(4, 0, 0, b"1"), frames.FRAME_SIZE_ERROR),
    "an acknowledgement with more": (GREETING + frame(4, 1, 0, bytes(6)), frames.FRAME_SIZE_ERROR),
    "a push that is neither on nor off": (
        GREETING + settings_frame({frames.ENABLE_PUSH: 2}),
        frames.PROTOCOL_ERROR,
    ),
    "a window beyond all": (
        GREETING + settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 31}),
        frames.FLOW_CONTROL_ERROR,
    ),
    "tiny frames": (GREETING + settings_frame({frames.MAX_FRAME_SIZE: 1}), frames.PROTOCOL_ERROR),
    "a frame too long": (GREETING + frame(0, 0, 1, bytes(16_385)), frames.FRAME_SIZE_ERROR),
    "an even stream": (GREETING + headers(2), frames.PROTOCOL_ERROR),
    "stream 0": (GREETING + headers(0), frames.PROTOCOL_ERROR),
    "data on no stream": (GREETING + data(0, b"x"), frames.PROTOCOL_ERROR),
    "data on an idle stream": (GREETING + data(1, b"x"), frames.PROTOCOL_ERROR),
    "a reset of an idle stream": (GREETING + frame(3, 0, 1, bytes(4)), frames.PROTOCOL_ERROR),
    "a reset of another length": (
        GREETING + headers(1) + frame(3, 0, 1, b"1"),
        frames.FRAME_SIZE_ERROR,
    ),
    "a window of an idle stream": (GREETING + window_frame(1, 1), frames.PROTOCOL_ERROR),
    "a window that does not grow": (GREETING + window_frame(0, 0), frames.PROTOCOL_ERROR),
    "a window that overflows": (
        GREETING + window_frame(0, 0x7FFF_FFFF),
        frames.FLOW_CONTROL_ERROR,
    ),
    "a window of another length": (GREETING + frame(8, 0, 0, b"1"), frames.FRAME_SIZE_ERROR),
    "a ping of a stream": (GREETING + frame(6, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
    "a ping of another length": (GREETING + frame(6, 0, 0, b"1"), frames.FRAME_SIZE_ERROR),
    "a push": (GREETING + headers(1) + frame(5, 4, 1, bytes(4)), frames.PROTOCOL_ERROR),
    "a continuation of nothing": (GREETING + frame(9, 4, 1), frames.PROTOCOL_ERROR),
    "an interrupted block": (
        GREETING + headers(1, flags=0) + frame(6, 0, 0, bytes(8)),
        frames.PROTOCOL_ERROR,
    ),
    "a continuation of another": (
        GREETING + headers(1, flags=0) + frame(9, 4, 3),
        frames.PROTOCOL_ERROR,
    ),
    "a priority of itself": (
        GREETING + frame(2, 0, 3, (3).to_bytes(4, "big") + b"\0"),
        frames.PROTOCOL_ERROR,
    ),
    "a priority of another length": (GREETING + frame(2, 0, 3, b"1"), frames.FRAME_SIZE_ERROR),
    "headers that depend on themselves": (
        GREETING + headers(3, (3).to_bytes(4, "big") + b"\0" + PLAIN, END_HEADERS | HAS_PRIORITY),
        frames.PROTOCOL_ERROR,
    ),
    "padding without a frame": (
        GREETING + headers(1) + frame(0, PADDED, 1, b"\x05abc"),
        frames.PROTOCOL_ERROR,
    ),
    "padding beyond the headers": (
        GREETING + headers(1, b"\xff\x00", END_HEADERS | PADDED),
        frames.PROTOCOL_ERROR,
    ),
    "an old stream": (
        GREETING + headers(3, flags=END_HEADERS) + headers(1),
        frames.STREAM_CLOSED,
    ),
    "headers that cannot be read": (GREETING + headers(1, b"\xff\xff\xff"), 9),
    "an index of no header": (GREETING + headers(1, b"\xc8"), 9),
    "a table too large": (GREETING + headers(1, b"\x3f\xe1\xff\x03"), 9),
    "a farewell of another form": (GREETING + frame(7, 0, 0, b"1"), frames.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_http2_forbids_ends_the_connection(name: str) -> None:
    sent, code = REFUSED[name]
    with pytest.raises(ConnectionViolation) as caught:
        Side().take(sent)
    assert caught.value.code == code


def test_a_stream_that_its_peer_ended_takes_nothing_more(side: Side) -> None:
    heard = side.take(headers(1), data(1, b"", ends=True), data(1, b"x"))
    assert heard[-1] == ("reset", 1)
    assert [(each.kind, each.code) for each in side.sent()] == [(3, frames.STREAM_CLOSED)]


def test_data_beyond_the_window_ends_the_stream() -> None:
    side = Side(ConnectionLimits(first_window=10))
    heard = side.take(GREETING, headers(1), data(1, bytes(10)), data(1, b"x"))
    assert heard[-1] == ("reset", 1)
    assert side.sent()[-1].code == frames.FLOW_CONTROL_ERROR


def test_padding_counts_for_the_window_and_is_not_heard() -> None:
    side = Side(ConnectionLimits(first_window=10))
    padded = frame(0, PADDED, 1, b"\x04abcd" + bytes(4))
    assert side.take(GREETING, headers(1), padded)[-1] == ("data", 1, b"abcd", False)
    assert side.opener.streams[1].receive_window == 1


def test_malformed_headers_end_their_stream_only(side: Side) -> None:
    heard = side.take(headers(1, encoded([(b"bad", b"")])), headers(3))
    assert [each[:2] for each in heard] == [("opened", 3)]
    assert [(each.number, each.code) for each in side.sent()] == [(1, frames.PROTOCOL_ERROR)]


def test_streams_beyond_the_number_are_refused() -> None:
    side = Side(ConnectionLimits(most_streams=2))
    heard = side.take(GREETING, *(headers(number) for number in (1, 3, 5)))
    assert [each[1] for each in heard] == [1, 3]
    assert side.sent()[-1].code == frames.REFUSED_STREAM


def test_after_a_farewell_later_streams_are_not_served(side: Side) -> None:
    side.take(headers(1))
    side.connection.leave()
    # They were on their way, with all that belongs to them, and do the others no harm.
    assert side.take(headers(3), data(3, b"x"), window_frame(3, 5), frame(3, 0, 3, bytes(4))) == []
    assert side.take(data(1, b"y")) == [("data", 1, b"y", False)]
    (farewell,) = [each for each in side.sent() if each.kind == frames.GOAWAY]
    assert farewell.payload == (1).to_bytes(4, "big") + bytes(4)


def test_a_block_may_come_in_parts_and_is_bounded(side: Side) -> None:
    heard = side.take(
        headers(1, PLAIN[:3], flags=END_STREAM),
        frame(9, 0, 1, PLAIN[3:5]),
        frame(9, 4, 1, PLAIN[5:]),
    )
    assert heard == [("opened", 1, ((b":path", b"/a"), (b"x", b"y")), True)]
    for flood in ([bytes(BLOCK_BYTES // 4)] * 5, [b""] * 100):
        parts = [frame(9, 0, 1, each) for each in flood]
        with pytest.raises(ConnectionViolation, match="too large"):
            Side().take(GREETING, headers(1, flags=0), *parts)


def test_a_bomb_of_headers_ends_the_connection(side: Side) -> None:
    encoder = Encoder()
    first = encoder.encode([(b"bomb", b"x" * 3000)])
    again = encoder.encode([(b"bomb", b"x" * 3000)])
    assert len(again) == 1
    with pytest.raises(ConnectionViolation) as caught:
        side.take(headers(1, first), headers(3, again * 100))
    assert caught.value.code == frames.ENHANCE_YOUR_CALM


def test_the_same_block_is_read_once_as_long_as_the_table_stays(side: Side) -> None:
    encoder = Encoder()
    pairs = [(b":path", b"/a"), (b"key", b"one")]
    side.take(headers(1, encoder.encode(pairs)))
    known = encoder.encode(pairs)
    for number in (3, 5, 7):
        assert side.take(headers(number, known))[0][2] == tuple(pairs)
    assert side.opener.parsed == 2
    # Another entry in the table shifts the indices; the old bytes mean something else now.
    side.take(headers(9, encoder.encode([(b"other", b"two")])))
    assert side.take(headers(11, known))[0][2] != tuple(pairs)
    assert side.take(headers(13, encoder.encode(pairs)))[0][2] == tuple(pairs)


HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b":path", b"grpc-timeout", b"x-a", b"authorization"])
        | st.binary(min_size=1),
        st.sampled_from([b"", b"/a", b"10S"]) | st.binary(),
        st.booleans(),
    ),
    max_size=8,
)


@given(blocks=st.lists(st.tuples(HEADERS, st.booleans(), st.integers(0, 4_096)), max_size=8))
def test_blocks_mean_what_the_encoder_of_the_library_meant(blocks: list[Any]) -> None:
    encoder, decoder = Encoder(), HeaderDecoder(tuple, 1 << 20)
    for pairs, packs, size in blocks:
        encoder.header_table_size = size
        block = encoder.encode(pairs, huffman=packs)
        assert decoder.decode(block) == tuple((name, value) for name, value, _ in pairs)


@given(blocks=st.lists(st.binary(max_size=30), max_size=8))
def test_any_bytes_mean_what_the_library_takes_them_for(blocks: list[bytes]) -> None:
    library, decoder = Decoder(), HeaderDecoder(tuple, 1 << 16)
    for block in blocks:
        try:
            meant = tuple(
                (bytes(name), bytes(value)) for name, value in library.decode(block, raw=True)
            )
        except (HPACKError, IndexError):
            with pytest.raises(ConnectionViolation):
                decoder.decode(block)
            return
        assert decoder.decode(block) == meant


def test_few_blocks_are_remembered_and_no_large_ones() -> None:
    decoder = HeaderDecoder(list, 1 << 16)
    small = [encoded([(b"x", b"%d" % number)]) for number in range(100)]
    large = encoded([(b"x", bytes(3_000))])
    assert decoder.decode(small[0]) is decoder.decode(small[0])
    assert decoder.decode(large) is not decoder.decode(large)
    first = decoder.decode(small[0])
    for block in small:
        decoder.decode(block)
    assert decoder.decode(small[0]) is not first


def test_what_a_connection_remembers_is_bounded_in_bytes() -> None:
    decoder = HeaderDecoder(list, 1 << 16)
    blocks = [encoded([(b"x%d" % number, bytes(900))]) for number in range(100)]
    tracemalloc.start()
    try:
        for block in blocks:
            assert decoder.decode(block) is decoder.decode(block)
        remembered, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert remembered < 12_000


FLOODS = {
    "resets": lambda number: headers(number) + frame(3, 0, number, bytes(4)),
    "settings": lambda _: settings_frame({frames.INITIAL_WINDOW_SIZE: 1000}),
    "pings": lambda _: frame(frames.PING, 0, 0, bytes(8)),
    "priorities": lambda number: frame(2, 0, number, bytes(4) + b"\1"),
    "windows": lambda _: window_frame(0, 1),
    "unknown frames": lambda _: frame(200, 0, 0, b"x"),
    "empty data": lambda _: data(1, b""),
    "farewells": lambda _: frame(7, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_end_the_connection_and_the_same_over_time_does_not(name: str) -> None:
    side, slow = Side(), Side()
    for each in (side, slow):
        each.take(GREETING, headers(1))
    make = FLOODS[name]
    with pytest.raises(ConnectionViolation) as caught:
        side.take(*map(make, range(3, 40_000, 2)))
    assert caught.value.code == frames.ENHANCE_YOUR_CALM
    for number in range(3, 10_000, 2):
        slow.take(make(number), now_s=number / 100)
        slow.sending.take()


def test_an_answer_goes_out_in_one_piece(side: Side) -> None:
    side.take(headers(1), data(1, b"", ends=True))
    side.sending.take()
    side.sending.answer(side.opener.streams[1], b"H", b"body", b"T")
    assert len(side.sending.out) == 1
    assert [(each.kind, each.flags, each.payload) for each in side.sent()] == [
        (frames.HEADERS, END_HEADERS, b"H"),
        (frames.DATA, 0, b"body"),
        (frames.HEADERS, END_HEADERS | END_STREAM, b"T"),
    ]
    assert not side.sending.streams


def test_an_answer_before_the_end_of_the_request_stops_the_rest(side: Side) -> None:
    side.take(headers(1))
    side.sending.answer(side.opener.streams[1], b"H", b"body", b"T")
    assert (side.sent()[-1].kind, side.sending.streams) == (frames.RST_STREAM, {})
    assert side.take(data(1, b"late")) == []  # it was on its way


@given(
    window=st.integers(0, 40_000),
    sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=5),
    grants=st.lists(st.tuples(st.booleans(), st.integers(1, 30_000)), max_size=12),
)
def test_no_more_is_sent_than_the_windows_allow(
    window: int, sizes: list[int], grants: list[tuple[bool, int]]
) -> None:
    side = Side()
    side.take(PREFACE, settings_frame({frames.INITIAL_WINDOW_SIZE: window}), headers(1))
    side.sent()
    stream, room, connection_room, got = side.opener.streams[1], window, 65_535, b""
    bodies = [bytes([at]) * size for at, size in enumerate(sizes)]
    for body in bodies:
        side.sending.data(stream, body)
    side.sending.trailers(stream, b"T")
    for of_stream, more in [(True, 0), *grants, (True, 1 << 20), (False, 1 << 20)]:
        if more:
            side.take(window_frame(1 if of_stream else 0, more))
            room, connection_room = (
                (room + more, connection_room) if of_stream else (room, connection_room + more)
            )
        for each in side.sent():
            if each.kind == frames.DATA:
                got += each.payload
                assert 0 < len(each.payload) <= 16_384
        assert len(got) <= min(room, connection_room)
        waits = side.sending.waiting_bytes
        assert waits == sum(sizes) - len(got)
        if waits:
            assert len(got) == min(room, connection_room)
        else:
            break
    assert got == b"".join(bodies)
    assert not side.sending.streams


def test_streams_take_turns(side: Side) -> None:
    side.take(headers(1), headers(3))
    side.sent()
    side.sending.is_held = True
    for number in (1, 3):
        side.sending.data(side.opener.streams[number], bytes(30_000))
    assert side.sent() == []
    side.sending.is_held = False
    side.sending.go_on()
    assert [each.number for each in side.sent()] == [1, 3, 1, 3]


SCRIPT = b"".join(
    [
        GREETING,
        headers(1),
        data(1, b"one"),
        frame(6, 0, 0, b"pingpong"),
        headers(3, PLAIN, END_HEADERS | END_STREAM),
        headers(5, PLAIN[:4], 0),
        frame(9, END_HEADERS, 5, PLAIN[4:]),
        frame(0, PADDED | END_STREAM, 1, b"\x03two\0\0\0"),
        window_frame(0, 5),
        frame(3, 0, 5, bytes(4)),
        headers(7, encoded([(b"bad", b"")])),
        frame(77, 1, 0, b"unknown"),
        data(3, b"late"),
    ]
)


@given(cuts=st.lists(st.integers(0, len(SCRIPT)), max_size=30))
def test_any_cutting_of_the_bytes_gives_the_same(cuts: list[int]) -> None:
    whole, cut = Side(), Side()
    whole.take(SCRIPT)
    ends = sorted({0, *cuts, len(SCRIPT)})
    for begin, end in itertools.pairwise(ends):
        cut.take(SCRIPT[begin:end])
    assert cut.opener.heard == whole.opener.heard
    assert cut.sent() == whole.sent()


@given(noise=st.binary(max_size=2_000), seed=st.integers(0, 200))
def test_noise_ends_the_connection_or_is_taken(noise: bytes, seed: int) -> None:
    side = Side()
    with contextlib.suppress(ConnectionViolation):
        side.take(SCRIPT[:seed], noise)
    assert side.sending.streams.keys() <= side.opener.streams.keys()


def test_many_calls_at_once_begin_in_turns() -> None:
    side = Side(ConnectionLimits(calls_at_once=3))
    opened = [headers(2 * at + 1, flags=END_HEADERS | END_STREAM) for at in range(7)]
    side.connection.receive(GREETING + b"".join(opened), 0.0)
    counts = [len(side.opener.heard)]
    while side.connection.has_more:
        side.connection.receive(b"", 0.0)
        counts.append(len(side.opener.heard))
    assert counts == [3, 6, 7]


def test_long_headers_count_as_several_calls_that_begin_at_once() -> None:
    side = Side(ConnectionLimits(calls_at_once=8))
    block = PLAIN + encoded([(b"x", bytes(400))])
    opened = [frame(frames.HEADERS, END_HEADERS | END_STREAM, 2 * at + 1, block) for at in range(5)]
    side.connection.receive(GREETING + b"".join(opened), 0.0)
    counts = [len(side.opener.heard)]
    while side.connection.has_more:
        side.connection.receive(b"", 0.0)
        counts.append(len(side.opener.heard))
    assert counts == [2, 4, 5]


def test_many_frames_at_once_are_handled_in_turns() -> None:
    side = Side()
    side.take(GREETING)
    side.sent()
    pings = [frames.frame(frames.PING, 0, 0, at.to_bytes(8, "big")) for at in range(300)]
    answered = []
    side.connection.receive(b"".join(pings), 0.0)
    answered.append([each.payload for each in side.sent()])
    while side.connection.has_more:
        side.connection.receive(b"", 0.0)
        answered.append([each.payload for each in side.sent()])
    assert [len(each) for each in answered] == [FRAMES_AT_ONCE, FRAMES_AT_ONCE, 44]
    assert list(itertools.chain(*answered)) == [at.to_bytes(8, "big") for at in range(300)]


LONG = PLAIN + encoded([(b"x", bytes(PASSING_BLOCK_BYTES))])
CALL = END_HEADERS | END_STREAM


def crowded() -> Turns:
    """Returns a turn in which all work is done."""
    turns = Turns()
    busy = Side(turns=turns)
    work = encoded([(b"x", bytes(SHORT_BLOCK_BYTES * WORK_AT_ONCE))])
    assert busy.read(GREETING + headers(1, work, CALL)) == [1]
    assert turns.budget.is_spent
    return turns


def test_long_headers_wait_for_a_turn_with_less_work_and_short_ones_do_not() -> None:
    turns = crowded()
    long, short = Side(turns=turns), Side(turns=turns)
    assert long.read(GREETING + headers(1, LONG, CALL)) == []
    assert long.connection.has_more
    assert short.read(GREETING + headers(1, PLAIN, CALL)) == [1]
    assert not short.connection.has_more
    turns.next()
    assert long.read() == [1]
    assert not long.connection.has_more


def test_headers_in_short_parts_wait_as_one() -> None:
    size = len(LONG) // 3
    parts = [LONG[:size], LONG[size : 2 * size], LONG[2 * size :]]
    side = Side(turns=crowded())
    framed = [frame(9, END_HEADERS if at == 2 else 0, 1, parts[at]) for at in (1, 2)]
    assert side.read(GREETING + headers(1, parts[0], END_STREAM) + framed[0]) == []
    assert not side.connection.has_more
    assert side.read(framed[1]) == []
    assert side.connection.has_more
    side.turns.next()
    assert side.read() == [1]


def test_who_has_waited_is_read_whatever_others_did_in_its_turn() -> None:
    side = Side(turns=crowded())
    opened = [side.read(GREETING + b"".join(headers(number, LONG, CALL) for number in (1, 3)))]
    assert side.turns.budget.is_spent
    while side.connection.has_more:
        opened.append(side.read())
    assert list(itertools.chain(*opened)) == [1, 3]


def test_frames_before_headers_that_wait_are_handled() -> None:
    side = Side(turns=crowded())
    side.read(GREETING + frame(frames.PING, 0, 0, b"pingpong") + headers(1, LONG, CALL))
    assert [each.payload for each in side.sent() if each.kind == frames.PING] == [b"pingpong"]


def test_of_many_short_calls_one_is_read_while_others_have_done_the_work() -> None:
    many = b"".join(headers(2 * at + 1, PLAIN, CALL) for at in range(10))
    side = Side(turns=crowded())
    assert side.read(GREETING + many) == [1]
    side.turns.next()
    assert side.read() == list(range(3, 20, 2))


def test_many_frames_are_work() -> None:
    turns = Turns()
    pings = frame(frames.PING, 0, 0, bytes(8)) * FRAMES_AT_ONCE
    busy = [Side(turns=turns) for _ in range(FRAMES_PER_WORK * WORK_AT_ONCE // FRAMES_AT_ONCE)]
    for side in busy:
        assert not turns.budget.is_spent
        side.read(GREETING + pings)
    assert turns.budget.is_spent
    late = Side(turns=turns)
    late.read(GREETING + pings)
    assert len(late.sent()) == FRAMES_PER_WORK
    assert late.connection.has_more


def test_the_next_turn_is_asked_for_once_and_only_if_there_was_work() -> None:
    asked: list[Callable[[], None]] = []
    budget = TurnBudget(asked.append)
    for _ in range(2):
        assert asked == []
        for _ in range(2 * WORK_AT_ONCE):
            budget.spend(1)
        (next_turn,) = asked
        assert budget.is_spent
        next_turn()
        assert not budget.is_spent
        asked.clear()


def test_what_waits_for_a_turn_counts_as_held() -> None:
    side = Side(turns=crowded())
    side.read(GREETING + headers(1, LONG, CALL))
    assert side.connection.unfinished_bytes > len(LONG)


def test_sources_take_turns_whatever_number_of_connections_they_have() -> None:
    queue: TurnQueue[str] = TurnQueue()
    for source, connection in ("a1", "a2", "a3", "a1", "b1", "a4", "b2"):
        queue.add(source, source + connection)
    taken = []
    while queue:
        taken.append(queue.take())
    assert taken == ["a1", "b1", "a2", "b2", "a3", "a4"]


def test_who_is_lost_has_no_turn() -> None:
    queue: TurnQueue[str] = TurnQueue()
    for source, connection in ("a1", "a2", "b1"):
        queue.add(source, source + connection)
    for source, connection in ("a1", "b1", "b2", "c1"):
        queue.drop(source, source + connection)
    assert queue.take() == "a2"
    assert not queue
