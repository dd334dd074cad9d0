"""Attacks on a cluster on this machine, bounded in number and time; each runs in a process of its own.

Started as `python attacks.py NAME` with a `Target` as JSON on its standard input; prints how often
it got which answer.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import select
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hostile import http2_attacks

SECONDS = 4.0
"""So long an attack goes on at most."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
_MEGABYTE = 1_000_000
_CHILDREN = resource.RUSAGE_CHILDREN
_SAID = (
    ("API key", "UNAUTHENTICATED"),
    ("too much of unfinished", "OVERLOADED"),
    ("had to be refused", "QUOTA_EXCEEDED"),
    ("quota", "QUOTA_EXCEEDED"),
    ("has more than", "PAYLOAD_TOO_LARGE"),
    ("are accepted", "PAYLOAD_TOO_LARGE"),
    ("arrive in time", "DEADLINE_EXCEEDED"),
)
_BOMB = b'{"inputs":[' + b"[]," * 2_600_000 + b"[]]}"


@dataclass(frozen=True)
class Target:
    """What is attacked."""

    grpc: str
    http: str
    admin: str
    scheduler: str
    control: str
    """Where the scheduler takes control streams."""
    frames: str
    shm: str
    model: str
    key: str
    """Of a client."""
    spent_key: str
    """Of a client with next to no quota."""
    certs: str
    """Folder with the certificates of somebody who lies."""
    hostile: str
    """Folder with models of strangers."""


Answers = Counter[str]


# gRPC


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags))
    return head + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    assert len(name) < 127
    assert len(value) < 127
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()


class HalfSent:
    """One HTTP/2 connection whose calls announce large messages and never finish them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), 5)
        self._sock.setblocking(False)
        self._host = target
        self._window, self._initial, self._most = 65_535, 65_535, 16_384
        self._windows: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._in = b""
        self._out = bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0))
        self.answers: Answers = Counter()
        self.sent = 0
        self.is_closed = False

    def call(self, stream: int, path: str, nbytes: int, *headers: tuple[str, str]) -> None:
        given = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._host),
            *headers,
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
        self._out += _frame(1, 4, stream, b"".join(_literal(*pair) for pair in given))
        self._windows[stream] = self._initial
        self._left[stream] = nbytes - 1000
        self._data(stream, b"\0" + nbytes.to_bytes(4, "big"))

    def turn(self, noise: bytes) -> None:
        """Sends what may be sent, and reads what came."""
        for stream, left in self._left.items():
            room = min(self._window, self._windows[stream], self._most, left)
            if room > 0 and len(self._out) < _MEGABYTE:
                self._data(stream, noise[:room])
                self._left[stream] -= room
        try:
            if self._out:
                del self._out[: self._sock.send(self._out)]
            if select.select([self._sock], [], [], 0.002)[0]:
                got = self._sock.recv(1 << 18)
                self.is_closed = not got
                self._in += got
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        self._read()

    def _data(self, stream: int, payload: bytes) -> None:
        self._out += _frame(0, 0, stream, payload)
        self._window -= len(payload)
        self._windows[stream] -= len(payload)
        self.sent += len(payload)

    def _read(self) -> None:
        while len(self._in) >= 9:
            size = int.from_bytes(self._in[:3], "big")
            if len(self._in) < 9 + size:
                return
            kind, flags = self._in[3], self._in[4]
            stream = int.from_bytes(self._in[5:9], "big") & 0x7FFFFFFF
            self._handle(kind, flags, stream, self._in[9 : 9 + size])
            self._in = self._in[9 + size :]

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == 4 and not flags & 1:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == 4:
                    for each in self._windows:
                        self._windows[each] += value - self._initial
                    self._initial = value
                self._most = value if name == 5 else self._most
            self._out += _frame(4, 1, 0)
        elif kind == 8 and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == 8 and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == 6 and not flags & 1:
            self._out += _frame(6, 1, 0, payload)
        elif kind == 1 and flags & 1:
            said = payload.decode("latin-1")
            self.answers[next((name for text, name in _SAID if text in said), "OK")] += 1
            self._left.pop(stream, None)
        elif kind == 3:
            self._left.pop(stream, None)
        elif kind == 7:
            self.is_closed = True


def _half_sent(
    target: str,
    path: str,
    *headers: tuple[str, str],
    calls: int = 40,
    connections: int = 1,
    nbytes: int = 60 * _MEGABYTE,
) -> Answers:
    noise = os.urandom(16_384)
    lines = [HalfSent(target) for _ in range(connections)]
    for line in lines:
        for number in range(calls // connections):
            line.call(2 * number + 1, path, nbytes, *headers)
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s and not all(line.is_closed for line in lines):
        for line in lines:
            if not line.is_closed:
                line.turn(noise)
    answers: Answers = Counter()
    for line in lines:
        answers += line.answers
        answers["sent_mb"] += line.sent // _MEGABYTE
    return answers


def _bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


# HTTP


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def _connect(target: str, source: str = "") -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), 5, (source, 0) if source else None)


def _flood(target: str, request: bytes, count: int = 40) -> Answers:
    """Asks from several connections at a time, `count` times in all."""
    answers: Answers = Counter()
    for _ in range(count // 8):
        lines = [_connect(target) for _ in range(8)]
        for line in lines:
            line.settimeout(20)
            _try_send(line, request)
        for line in lines:
            try:
                answers[line.recv(4096).split(b" ", 2)[1].decode()] += 1
            except (OSError, IndexError):
                answers["closed"] += 1
            line.close()
    return answers


def _try_send(sock: socket.socket, data: bytes) -> None:
    # It may answer before it has read all, and should.
    with contextlib.suppress(OSError):
        sock.sendall(data)


def _infer_of(target: Target, body: bytes, key: str, *headers: str) -> bytes:
    path = f"/v2/models/{target.model}/infer"
    authorization = (f"Authorization: Bearer {key}",) if key else ()
    return _post(path, body, "Content-Type: application/json", *authorization, *headers)


def _packed(target: Target, body: bytes, key: str) -> bytes:
    return _infer_of(target, gzip.compress(body), key, "Content-Encoding: gzip")


def _chat_of(target: Target, body: bytes) -> bytes:
    return _post("/v1/chat/completions", body, f"Authorization: Bearer {target.key}")


def _dripped(target: str, head: bytes, drip: bytes, count: int) -> Answers:
    """Keeps connections open with a byte now and then; says how many were closed on it."""
    lines = [_connect(target) for _ in range(count)]
    for line in lines:
        _try_send(line, head)
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        for line in lines:
            _try_send(line, drip)
        time.sleep(0.5)
    answers: Answers = Counter()
    for line in lines:
        line.setblocking(False)
        try:
            answers[line.recv(64).split(b" ", 2)[1].decode()] += 1
        except BlockingIOError:
            answers["open"] += 1
        except (OSError, IndexError):
            answers["closed"] += 1
    return answers


def _half_bodies(target: str, of: Target) -> Answers:
    """Sends bodies but for their last bytes."""
    head = _infer_of(of, b"", of.key).replace(b"Length: 0", b"Length: 15000000")
    return _dripped(target, head + b"[" + b" " * 14 * _MEGABYTE, b" ", 16)


# Frames


def _rate(connect: Callable[[], socket.socket], first: bytes, per_s: int = 900) -> Answers:
    """Opens connections at a rate, says `first` on each, and holds them."""
    held: list[socket.socket] = []
    answers: Answers = Counter()
    for _ in _ticks(SECONDS):
        for _ in range(per_s // 10):
            try:
                sock = connect()
                sock.setblocking(False)
                if first:
                    sock.send(first)
                held.append(sock)
                answers["tried"] += 1
            except OSError:
                answers["refused"] += 1
        while len(held) > 3000:
            held.pop(0).close()
    return answers


def _ticks(seconds: float) -> Iterator[None]:
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < seconds:
        tick_s = time.monotonic()
        yield
        time.sleep(max(0.0, 0.1 - (time.monotonic() - tick_s)))


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def _strangers(target: str) -> Answers:
    """Handshakes without a certificate, one after the other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answers: Answers = Counter()
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s and answers.total() < 300:
        try:
            with _connect(target, "127.0.0.9") as sock:
                sock.settimeout(5)
                with context.wrap_socket(sock) as secure:
                    answers["let in" if secure.recv(1) else "closed"] += 1
        except OSError:
            answers["closed"] += 1
    return answers


def _over_http2(name: str) -> Callable[[Target], Answers]:
    attack = http2_attacks.ATTACKS[name]
    return lambda target: attack(target.grpc, _bearer(target.key))


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(0.05)
    sock.connect(path)
    return sock


def _model(target: Target, name: str) -> Answers:
    from hostile import hostile_models

    return hostile_models.tried(Path(target.hostile), name)


def _lie(target: Target, name: str) -> Answers:
    from hostile import attacks_from_within

    return attacks_from_within.lied(target.scheduler, target.certs, name, SECONDS)


def _storm(target: Target) -> Answers:
    from hostile import attacks_from_within

    return attacks_from_within.stormed(target.scheduler, target.certs, SECONDS)


ATTACKS: dict[str, Callable[[Target], Answers]] = {
    # Memory before anybody is known
    "half sent without a key": lambda t: _half_sent(t.grpc, INFER),
    "half sent with a wrong key": lambda t: _half_sent(t.grpc, INFER, _bearer("x" * 40)),
    "half sent over many connections": lambda t: _half_sent(
        t.grpc, INFER, calls=200, connections=200
    ),
    "half sent to a method without a key": lambda t: _half_sent(
        t.grpc, "/inference.GRPCInferenceService/ServerLive"
    ),
    "half sent to the health service": lambda t: _half_sent(
        t.grpc, "/grpc.health.v1.Health/Check", nbytes=15 * _MEGABYTE
    ),
    "half sent to operators' port": lambda t: _half_sent(
        t.admin, "/catenary.v1.Admin/GetStatus", nbytes=15 * _MEGABYTE
    ),
    "half sent by a client": lambda t: _half_sent(
        t.grpc, INFER, _bearer(t.key), nbytes=15 * _MEGABYTE
    ),
    "one after the other half sent by a client": lambda t: _half_sent(
        t.grpc, INFER, _bearer(t.key), nbytes=33 * _MEGABYTE, calls=8, connections=8
    ),
    "half sent bodies of a client": lambda t: _half_bodies(t.http, t),
    "silence at the scheduler": lambda t: _rate(lambda: _connect(t.scheduler), b"", 100),
    "silence at the control port": lambda t: _rate(lambda: _connect(t.control), b"", 100),
    # The time of the event loop
    "bombs": lambda t: _flood(t.http, _packed(t, _BOMB, t.key)),
    "bombs without a key": lambda t: _flood(t.http, _packed(t, _BOMB, "")),
    "bombs over the quota": lambda t: _flood(t.http, _packed(t, _BOMB, t.spent_key)),
    "zeros that inflate a thousand times": lambda t: _flood(
        t.http, _packed(t, bytes(15 * _MEGABYTE), t.key)
    ),
    "deep": lambda t: _flood(t.http, _packed(t, b"[" * 8 * _MEGABYTE, t.key)),
    "a number of a million digits": lambda t: _flood(
        t.http, _infer_of(t, b'{"id":' + b"7" * _MEGABYTE + b"}", t.key)
    ),
    "objects without number": lambda t: _flood(
        t.http, _packed(t, b'{"inputs":[' + b'{"name":0},' * 700_000 + b"{}]}", t.key)
    ),
    "a chat of lists": lambda t: _flood(
        t.http, _chat_of(t, b'{"messages":[' + b"[]," * 2_600_000 + b"[]]}")
    ),
    "a flood of nonsense": lambda t: _flood(t.http, _infer_of(t, b"{", t.key), 2_000),
    "a flood to no route": lambda t: _flood(t.http, b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n", 2_000),
    "terabytes announced": lambda t: _flood(
        t.http,
        _infer_of(t, b"", t.key).replace(b"Content-Length: 0", b"Content-Length: 1000000000000"),
    ),
    "silence at the HTTP port": lambda t: _rate(lambda: _connect(t.http), b"", 300),
    "dripped headers": lambda t: _dripped(t.http, b"GET / HTTP/1.1\r\nX: ", b"x", 400),
    "dripped bodies": lambda t: _dripped(
        t.http,
        _infer_of(t, b"", t.key).replace(b"Content-Length: 0", b"Content-Length: 15000000"),
        b"[",
        100,
    ),
    # The rules of HTTP/2
    **{name: _over_http2(name) for name in http2_attacks.ATTACKS},
    # Who may connect
    "silent peers": lambda t: _rate(lambda: _connect(t.frames), b""),
    "half a handshake": lambda t: _rate(lambda: _connect(t.frames, "127.0.0.9"), _client_hello()),
    "half a handshake from the address of peers": lambda t: _rate(
        lambda: _connect(t.frames), _client_hello()
    ),
    "another protocol": lambda t: _rate(lambda: _connect(t.frames), b"GET / HTTP/1.1\r\n\r\n"),
    "the first byte of a handshake": lambda t: _rate(
        lambda: _connect(t.frames, "127.0.0.9"), b"\x16"
    ),
    "no certificate": lambda t: _strangers(t.frames),
    "silence on this machine": lambda t: _rate(lambda: _unix(t.shm), b"", 300),
    # Model files
    "a program that writes a file": lambda t: _model(t, "writes"),
    "a program with a tower of powers": lambda t: _model(t, "tower"),
    "a program that reads a file": lambda t: _model(t, "reads"),
    "a program that wants a terabyte": lambda t: _model(t, "terabyte"),
    "a program that is deep": lambda t: _model(t, "deep"),
    "a program that is code": lambda t: _model(t, "code"),
    "a graph with weights elsewhere": lambda t: _model(t, "elsewhere"),
    "a language model of links": lambda t: _model(t, "links"),
    # Peers that lie
    "an epoch of 2^64-1": lambda t: _lie(t, "an epoch of 2^64-1"),
    "an epoch of 2^53+1": lambda t: _lie(t, "an epoch of 2^53+1"),
    "an epoch that is to come": lambda t: _lie(t, "an epoch that is to come"),
    "times that cannot be": lambda t: _lie(t, "times that cannot be"),
    "batches of others": lambda t: _lie(t, "batches of others"),
    "a million partitions": lambda t: _lie(t, "a million partitions"),
    "another agent's name": lambda t: _lie(t, "another agent's name"),
    "nonsense of a peer": lambda t: _lie(t, "nonsense"),
    "a gateway that lies": lambda t: _lie(t, "a gateway that lies"),
    "a storm of hellos": _storm,
}


@dataclass(frozen=True)
class Usage:
    """Memory of a process, in MB."""

    resident: float
    peak: float


def usage_of(pid: int) -> Usage:
    with open(f"/proc/{pid}/status") as status:
        facts = dict(line.split(":", 1) for line in status)
    return Usage(*(int(facts[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")))


def forget_peak(pid: int) -> None:
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")


def listening_of(pid: int) -> list[str]:
    """Where a process listens over TCP."""
    found = psutil.Process(pid).net_connections("tcp")
    return [
        f"{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}"
        for each in found
        if each.status == "LISTEN"
    ]


def as_json(target: Target) -> str:
    return json.dumps(asdict(target))


def burn(share: float, seconds: float) -> None:
    """Takes a share of the processors, as an attack did, and harms nobody otherwise."""
    begin_s = time.monotonic()
    while (passed_s := time.monotonic() - begin_s) < seconds:
        if time.process_time() < share * passed_s:
            sum(range(2_000))
        else:
            time.sleep(0.001)


def attacked(target: Target, name: str) -> Answers:
    """Runs an attack, and counts what it cost its own side."""
    begin_s = time.monotonic()
    answers = ATTACKS[name](target)
    mine = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, _CHILDREN))
    answers["cpu_ms"] = round(1e3 * mine)
    answers["wall_ms"] = round(1e3 * (time.monotonic() - begin_s))
    return answers


if __name__ == "__main__":
    os.nice(5)
    if sys.argv[1] == "--burn":
        burn(float(sys.argv[2]), float(sys.argv[3]))
    else:
        print(json.dumps(attacked(Target(**json.load(sys.stdin)), sys.argv[1])))
