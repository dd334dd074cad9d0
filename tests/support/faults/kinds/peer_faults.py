"""Peers with a valid identity that say what is not so."""

from __future__ import annotations

import random

from faults.base import AGENTS, GATEWAYS, Fault, Promise, fault
from faults.liar import LIAR, LyingAgent, LyingPeer
from faults.world import World


@fault
class LiesToSchedulers(Fault):
    name = "lying-agent"
    about = "one more agent says hello to the schedulers, and then nonsense"
    promise = Promise(10.0, served_s=3.0)
    hold_s = (4.0, 8.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._draw = draw
        return (LIAR,)

    async def apply(self, world: World) -> None:
        self._liar = LyingAgent(self._draw, world.cluster.scheduler_addresses)
        self._liar.start()

    async def undo(self, world: World) -> None:
        await self._liar.stop()


@fault
class LiesToPeers(Fault):
    name = "lying-peer"
    about = "a peer sends frames of nonsense to an agent or a gateway"
    promise = Promise(10.0, served_s=3.0)
    hold_s = (4.0, 8.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._draw = draw
        return (draw.choice((*AGENTS, *GATEWAYS)),)

    async def apply(self, world: World) -> None:
        name = self.victims[0]
        host = world.cluster.place(name).host
        self._liar = LyingPeer(self._draw, host, world.frame_port(name))
        self._liar.start()

    async def undo(self, world: World) -> None:
        await self._liar.stop()
