"""Wall clocks of single processes, set an hour ahead or back."""

from __future__ import annotations

import random

from faults.base import AGENTS, CLOCKS, GATEWAYS, LEADER, REDIS, STANDBY, Fault, Promise, fault
from faults.world import World

_HOUR_S = 3600
_KINDS = {
    "gateway": GATEWAYS,
    "scheduler": (LEADER, STANDBY),
    "agent": AGENTS,
    "redis": (REDIS,),
}


class ClockStep(Fault):
    """Befalls the clock of one process; it is put right in one step, too."""

    needs = frozenset({CLOCKS})
    kind: str

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self.step_s = draw.choice([-_HOUR_S, _HOUR_S])
        return (draw.choice(_KINDS[self.kind]),)

    def figures(self) -> list[str]:
        return [f"{self.step_s:+d} s"]

    async def apply(self, world: World) -> None:
        self.stepped = await world.resolve(self.victims[0])
        world.clocks[self.stepped].step(self.step_s)

    async def undo(self, world: World) -> None:
        world.clocks[self.stepped].step(0)


def _register() -> None:
    for kind in _KINDS:
        served_s = 4.0 if kind == "redis" else 1.0
        fault(
            type(
                f"Clock{kind.title()}",
                (ClockStep,),
                {
                    "name": f"clock-{kind}",
                    "about": f"the wall clock of a {kind} is an hour off",
                    "kind": kind,
                    "promise": Promise(5.0, served_s),
                },
            )
        )


_register()
