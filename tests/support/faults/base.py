"""What a fault is: whom it befalls, how it begins and ends, and what is promised meanwhile."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from faults.world import World

AGENTS = tuple(f"agent-{number}" for number in range(4))
GATEWAYS = ("gateway-0", "gateway-1")
LEADER, STANDBY, REDIS = "leader", "standby", "redis"
"""Roles: the schedulers who have them are known when the fault begins."""
NETWORK, CLOCKS, MOUNTS, FAULTS_FILE = "network", "clocks", "mounts", "faults file"
"""What a fault may need of the machine, or of the software under test."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What docs/failures.md promises of a fault.

    Attributes:
        recovered_s: So long after it is over, every request is answered as usual again.
        served_s: So long after it began, every new request is answered while it lasts; None:
            requests may be refused, in a stated error, until it is over.
    """

    recovered_s: float
    served_s: float | None = None


class Fault(ABC):
    """One fault with its victims and figures drawn; `apply` and `undo` are called once each.

    Attributes:
        name: In the schedule, in tables and in docs/failures.md.
        about: What happens, in a few words.
        promise: What holds when nothing else is broken.
        hold_s: It lasts for a time between these two.
        needs: Without one of these on the machine it is skipped.
        ends: Its victim may end by itself; who ends otherwise is a finding.
        excuses: Logged exceptions that contain one of these, in event or last line, are part of it.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    promise: ClassVar[Promise]
    hold_s: ClassVar[tuple[float, float]] = (3.0, 6.0)
    needs: ClassVar[frozenset[str]] = frozenset()
    ends: ClassVar[bool] = False
    excuses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, draw: random.Random) -> None:
        self.victims = self.choose(draw)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        """Returns the roles it befalls; draws whatever else is to be drawn."""
        return ()

    @abstractmethod
    async def apply(self, world: World) -> None: ...

    async def undo(self, world: World) -> None:  # noqa: B027 - most end when they are over
        """Ends it; what the platform has to mend by itself is left to it."""

    def __str__(self) -> str:
        return f"{self.name}({', '.join([*self.victims, *self.figures()])})"

    def figures(self) -> list[str]:
        """Returns what was drawn beside the victims."""
        return []


REGISTRY: dict[str, type[Fault]] = {}

F = TypeVar("F", bound=type[Fault])


def fault(cls: F) -> F:
    """Puts a fault into the registry."""
    assert cls.name not in REGISTRY, f"two faults are named {cls.name}"
    REGISTRY[cls.name] = cls
    return cls
