"""The machines that joined, in a file of the host: whose certificates are renewed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from catenary_services.errors import PermissionDenied, Unavailable
from catenaryd.enrolment.private_files import read_json, write_json

MOST_MACHINES = 4_096
ARRIVAL_S = 120.0
"""Seconds that a machine has between its certificates and its first connection; until then its name
is taken."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that joined."""

    name: str
    group: int
    enrolled: float
    """Seconds since 1970."""
    address: str = ""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Digests of the public keys of each agent: that of its newest certificate, then the one
    before, whose holder may not have received the newest."""


class MachineRegistry:
    """The file of a cluster's machines. One process uses it: the host."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """Reads the file if it exists.

        Raises:
            InvalidInput: It is damaged.
        """
        self._file = file
        self._clock = clock
        self._machines = self._read()

    @property
    def machines(self) -> tuple[Machine, ...]:
        return tuple(self._machines.values())

    def next_group(self, groups: int) -> int:
        """Returns the scheduler group with the fewest machines that joined."""
        sizes = [0] * groups
        for machine in self._machines.values():
            sizes[machine.group % groups] += 1
        return sizes.index(min(sizes))

    def check_free(self, name: str, keys: dict[str, str], connected: set[str]) -> None:
        """Checks that a machine may have a name and names of agents.

        Args:
            name: The machine's name.
            keys: Digest of the public key of each agent.
            connected: The agents that the cluster hears now.

        Raises:
            PermissionDenied: A machine that is there has them.
            Unavailable: A machine that is about to come has them.
        """
        known = self._machines.get(name)
        taken = sorted(connected & keys.keys())
        if known is not None:
            taken += sorted(connected & known.keys.keys())
        if taken:
            raise PermissionDenied(
                f"the name {name!r} is taken: agent {taken[0]} is there; choose another (--name),"
                " or let that machine leave first (catenaryd leave)"
            )
        if known is None:
            if len(self._machines) >= MOST_MACHINES:
                raise PermissionDenied(f"{MOST_MACHINES} machines have joined, and none may more")
            return
        is_same = all(digest in known.keys.get(agent, ()) for agent, digest in keys.items())
        left_s = known.enrolled + ARRIVAL_S - self._clock()
        if not is_same and left_s > 0:
            raise Unavailable(
                f"another machine joins as {name!r} just now; choose another name, or try again"
                f" in {left_s:.0f} s"
            )

    def add(self, machine: Machine) -> None:
        """Notes a machine, in place of one that had the name."""
        self._machines[machine.name] = machine
        self._write()

    def machine_of(self, agent_id: str, key: str) -> Machine:
        """Returns the machine of an agent that shows a certificate.

        Raises:
            PermissionDenied: It has left, or another machine has taken its name.
        """
        for machine in self._machines.values():
            if key in machine.keys.get(agent_id, ()):
                return machine
        raise PermissionDenied(
            f"agent {agent_id} has left this cluster, or its name was given to another machine;"
            " join again with a token"
        )

    def renew(self, machine: Machine, agent_id: str, shown: str, key: str) -> None:
        """Notes the key of an agent's next certificate, asked for with the one of key `shown`."""
        keys = [key, shown] if key != shown else [key]
        self.add(replace(machine, keys={**machine.keys, agent_id: keys}))

    def remove(self, machine: Machine) -> None:
        """Forgets a machine: nothing of it is renewed any more, and its name is free."""
        del self._machines[machine.name]
        self._write()

    def _read(self) -> dict[str, Machine]:
        found = read_json(self._file, lambda found: [_machine(each) for each in found["machines"]])
        return {each.name: each for each in found or ()}

    def _write(self) -> None:
        machines = [asdict(each) for each in self._machines.values()]
        write_json(self._file, {"machines": machines})


def _machine(entry: Any) -> Machine:
    made = Machine(**entry)
    if not isinstance(made.keys, dict) or not isinstance(made.group, int):
        raise ValueError("an entry has values of other types")
    return made
