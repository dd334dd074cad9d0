"""Too much of something from outside: connections, requests, cancellations."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from contextlib import suppress

from faults.base import AGENTS, GATEWAYS, Fault, Promise, fault
from faults.world import World

_CONNECTIONS = 1_500
_PACK = 100


class Flood(Fault):
    """Silent connections to one port, opened as fast as they are taken, closed at the end."""

    async def apply(self, world: World) -> None:
        self._open: list[asyncio.StreamWriter] = []
        host, port = self.port(world)
        for _ in range(_CONNECTIONS // _PACK):
            opening = (connected(host, port) for _ in range(_PACK))
            self._open += [made for made in await asyncio.gather(*opening) if made is not None]
        world.note("connections", self.victims[0], open=len(self._open))

    async def undo(self, world: World) -> None:
        for writer in self._open:
            writer.close()

    @abstractmethod
    def port(self, world: World) -> tuple[str, int]: ...


async def connected(host: str, port: int) -> asyncio.StreamWriter | None:
    """Returns a connection to a port, or None if nobody takes it within a second."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, port)
            return writer
    return None


@fault
class FrameFlood(Flood):
    name = "flood-frames"
    about = "1,500 silent connections at an agent's frame port"
    promise = Promise(5.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(AGENTS),)

    def port(self, world: World) -> tuple[str, int]:
        return world.cluster.place(self.victims[0]).host, world.frame_port(self.victims[0])


@fault
class EndpointFlood(Flood):
    name = "flood-endpoints"
    about = "1,500 silent connections at a gateway's gRPC and HTTP ports"
    promise = Promise(5.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._which = draw.choice(["grpc_port", "http_port"])
        return (draw.choice(GATEWAYS),)

    def figures(self) -> list[str]:
        return [self._which]

    def port(self, world: World) -> tuple[str, int]:
        member = world[self.victims[0]]
        return member.place.host, int(member.settings[self._which])


@fault
class CancelStorm(Fault):
    name = "cancel-storm"
    about = "40 requests a second are given up while they run"
    promise = Promise(8.0)

    async def apply(self, world: World) -> None:
        self._storm = asyncio.create_task(self._blow(world))

    async def _blow(self, world: World) -> None:
        while True:
            world.load.burst(5, 5, cancel=True)
            await asyncio.sleep(0.25)

    async def undo(self, world: World) -> None:
        self._storm.cancel()
        await asyncio.gather(self._storm, return_exceptions=True)


@fault
class Burst(Fault):
    name = "burst"
    about = "60 photographs and 20 texts at once"
    promise = Promise(20.0)
    hold_s = (0.5, 1.0)

    async def apply(self, world: World) -> None:
        world.load.burst(60, 20, cancel=False)
