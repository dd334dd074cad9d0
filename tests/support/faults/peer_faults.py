"""Peers with a valid identity that say what is not so."""

from __future__ import annotations

import random

from faults.base import Fault, Promise, fault
from faults.liar import LIAR, Liar
from faults.world import World


@fault
class LyingAgent(Fault):
    name = "lying-agent"
    about = "one more agent says hello, and then nonsense"
    promise = Promise(10.0, served_s=3.0)
    hold_s = (4.0, 8.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._draw = draw
        return (LIAR,)

    async def apply(self, world: World) -> None:
        self._liar = Liar(self._draw, world.cluster.scheduler_addresses)
        self._liar.start()

    async def undo(self, world: World) -> None:
        await self._liar.stop()
