"""A switch between network namespaces, in a process of its own: `python virtual_switch.py PLAN`.

It holds a TUN device in every namespace and carries packets from one to the other; what is lost,
and how late the rest is, can be changed at any moment. A kernel's netem does the same, where it is
built in; firewalls cannot delay. PLAN is JSON: {"namespace or empty for this one": ["device",
"address"]}. Every line on stdin is JSON too, the rules from then on: {"from>to": [loss, delay_s,
bytes_per_s]}, by address, 0 bytes per second being no limit; each is answered by a line on stdout.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress

_TUN, _NO_PACKET_INFO, _SET_DEVICE = 0x0001, 0x1000, 0x400454CA
_NEW_NET = 0x40000000
_LARGEST = 65_535
_MOST_WAITING = 20_000
"""Packets that are delayed; more are lost, as in any switch."""
_LONGEST_QUEUE_S = 0.5
"""What would wait longer for its turn on a slow way is lost."""


def main() -> None:
    plan: dict[str, list[str]] = json.loads(sys.argv[1])
    devices = {address: _open(name, device) for name, (device, address) in plan.items()}
    print("ready", flush=True)
    Switch(devices).run()


class Switch:
    """Carries packets until stdin ends."""

    def __init__(self, devices: dict[str, int]) -> None:
        self._files = {_packed(address): file for address, file in devices.items()}
        self._rules: dict[bytes, tuple[float, float, float]] = {}
        self._free_s: dict[bytes, float] = {}
        self._waiting: list[tuple[float, int, bytes]] = []
        self._count = 0
        self._random = random.Random(1)

    def run(self) -> None:
        watched = selectors.DefaultSelector()
        watched.register(sys.stdin, selectors.EVENT_READ)
        for file in self._files.values():
            os.set_blocking(file, False)
            watched.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select(self._until_next_s()):
                if key.fileobj is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._obey(line)
                else:
                    self._read(key.fd)
            self._send_due()

    def _obey(self, line: str) -> None:
        self._rules.clear()
        for pair, (loss, delay_s, bytes_per_s) in json.loads(line).items():
            source, _, target = pair.partition(">")
            self._rules[_packed(source) + _packed(target)] = (loss, delay_s, bytes_per_s)
        print("done", flush=True)

    def _read(self, file: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(64):
                packet = os.read(file, _LARGEST)
                self._carry(packet, _way_of(packet))

    def _carry(self, packet: bytes, way: bytes) -> None:
        loss, delay_s, bytes_per_s = self._rules.get(way, (0.0, 0.0, 0.0))
        if loss and self._random.random() < loss:
            return
        if bytes_per_s:
            now_s = time.monotonic()
            turn_s = max(now_s, self._free_s.get(way, 0.0))
            if turn_s > now_s + _LONGEST_QUEUE_S:
                return
            self._free_s[way] = turn_s + len(packet) / bytes_per_s
            delay_s += self._free_s[way] - now_s
        if not delay_s:
            self._write(packet)
        elif len(self._waiting) < _MOST_WAITING:
            self._count += 1
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._count, packet))

    def _until_next_s(self) -> float | None:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def _send_due(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            self._write(heapq.heappop(self._waiting)[2])

    def _write(self, packet: bytes) -> None:
        way = _way_of(packet)
        file = self._files.get(way[len(way) // 2 :])
        if file is not None:
            with suppress(BlockingIOError, OSError):
                os.write(file, packet)


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def _way_of(packet: bytes) -> bytes:
    """Returns source and target of a packet, IPv4 or IPv6."""
    return packet[12:20] if packet[0] >> 4 == 4 else packet[8:40]


def _open(namespace: str, device: str) -> int:
    """Returns a TUN device in a namespace; the file stays usable from here."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if namespace:
            _enter(f"/run/netns/{namespace}")
        file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(file, _SET_DEVICE, struct.pack("16sH", device.encode(), _TUN | _NO_PACKET_INFO))
        return file
    finally:
        _enter(f"/proc/self/fd/{here}")
        os.close(here)


def _enter(path: str) -> None:
    there = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(there, _NEW_NET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(there)


if __name__ == "__main__":
    main()
