"""Network namespaces with a network between them that can be cut, slow or lossy."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fault_cluster import Place

HERE = "test"
"""The namespace the tests themselves are in."""
_SWITCH = Path(__file__).with_name("virtual_switch.py")


class VirtualNetwork:
    """One namespace for each name, all in one subnet, joined by a switch of ours.

    Attributes:
        places: Where a process of that name is to run, and its address.
        address: Of the tests.
    """

    def __init__(self, names: Sequence[str], *, ipv6: bool = False) -> None:
        self._tag = f"{os.getpid() % 10_000}{random.randrange(100):02d}"
        self._ipv6 = ipv6
        subnet = f"10.{random.randrange(64, 128)}.{random.randrange(256)}."
        if ipv6:
            subnet = f"fd00:{random.randrange(1 << 16):x}::"
        self.address = f"{subnet}1"
        self._addresses = {HERE: self.address} | {
            name: f"{subnet}{number}" for number, name in enumerate(names, 10)
        }
        self._spaces = {name: f"cat{self._tag}-{number}" for number, name in enumerate(names)}
        self.places = {
            name: Place(self._addresses[name], ("ip", "netns", "exec", space))
            for name, space in self._spaces.items()
        }
        self._usual: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._rules: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._switch: subprocess.Popen[str] | None = None

    def start(self) -> None:
        for space in self._spaces.values():
            _ip("netns", "add", space)
        device = f"cat{self._tag}"
        plan = {space: [device, self._addresses[n]] for n, space in self._spaces.items()}
        plan[""] = [device, self.address]
        self._switch = subprocess.Popen(
            [sys.executable, _SWITCH, json.dumps(plan)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._answer("ready")
        for name, address in self._addresses.items():
            inside = ("-n", self._spaces[name]) if name != HERE else ()
            length = ["64", "nodad"] if self._ipv6 else ["24"]
            _ip(*inside, "addr", "add", f"{address}/{length[0]}", "dev", device, *length[1:])
            _ip(*inside, "link", "set", device, "up", "mtu", "1500")
            if inside:
                _ip(*inside, "link", "set", "lo", "up")

    def stop(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(10)
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def cut(self, these: Iterable[str], those: Iterable[str], *, one_way: bool = False) -> None:
        """Nothing gets from these to those any more, nor back unless it is `one_way`."""
        self.impair(these, those, loss=1.0, one_way=one_way)

    def impair(
        self,
        these: Iterable[str],
        those: Iterable[str],
        *,
        loss: float = 0.0,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        one_way: bool = False,
    ) -> None:
        """Packets between these and those get lost with a probability, the others are late.

        With `bytes_per_s`, no more than that gets through; 0: as much as comes.
        """
        for source, target in itertools.product(list(these), list(those)):
            self._rules[source, target] = (loss, delay_s, bytes_per_s)
            if not one_way:
                self._rules[target, source] = (loss, delay_s, bytes_per_s)
        self._tell()

    def lengthen(self, names: Sequence[str], delay_s: float) -> None:
        """Every way between two of these takes so long when nothing is wrong with it."""
        for pair in itertools.permutations(names, 2):
            self._usual[pair] = (0.0, delay_s, 0.0)
        self._tell()

    def heal(self) -> None:
        """Everything gets through at once."""
        self._rules.clear()
        self._tell()

    def heal_between(self, these: Iterable[str], those: Iterable[str]) -> None:
        """Everything between these and those gets through at once, whatever else is broken."""
        for source, target in itertools.product(list(these), list(those)):
            self._rules.pop((source, target), None)
            self._rules.pop((target, source), None)
        self._tell()

    def _tell(self) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        at = self._addresses
        rules = {f"{at[a]}>{at[b]}": rule for (a, b), rule in (self._usual | self._rules).items()}
        self._switch.stdin.write(json.dumps(rules) + "\n")
        self._switch.stdin.flush()
        self._answer("done")

    def _answer(self, wanted: str) -> None:
        assert self._switch is not None
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline().strip()
        assert line == wanted, f"the switch says {line!r}, ended with {self._switch.poll()}"


@contextmanager
def virtual_network(names: Sequence[str], *, ipv6: bool = False) -> Iterator[VirtualNetwork]:
    """Gives a network; skips the test where this machine, or this user, cannot have one."""
    _skip_unless_possible()
    network = VirtualNetwork(names, ipv6=ipv6)
    try:
        network.start()
        yield network
    finally:
        network.stop()


def _skip_unless_possible() -> None:
    if reason := why_impossible():
        pytest.skip(reason)


def why_impossible() -> str:
    """Returns why this machine, or this user, cannot have such a network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (the command ip)"
    if not Path("/dev/net/tun").exists():
        return "the virtual network needs /dev/net/tun"
    probe = f"catprobe{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
