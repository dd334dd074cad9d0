"""Processes killed, frozen and told to stop: three ways for each of five kinds."""

from __future__ import annotations

import asyncio
import random
import signal
from abc import abstractmethod

from faults.base import AGENTS, GATEWAYS, LEADER, REDIS, STANDBY, Fault, Promise, fault
from faults.world import World

_KINDS = {
    "gateway": GATEWAYS,
    "leader": (LEADER,),
    "standby": (STANDBY,),
    "agent": AGENTS,
    "redis": (REDIS,),
}
_AFTER = {"gateway": 20.0, "leader": 8.0, "standby": 8.0, "agent": 20.0, "redis": 5.0}
"""A killed gateway or agent has to start, and to load, before what it is at is as fast as before."""
_SERVED = {
    "kill": {"gateway": 2.0, "leader": 5.0, "standby": 1.0, "agent": 3.0, "redis": 1.0},
    "freeze": {"gateway": None, "leader": 6.0, "standby": 1.0, "agent": 6.0, "redis": 1.0},
    "stop": {"gateway": 2.0, "leader": 3.0, "standby": 1.0, "agent": 3.0, "redis": 1.0},
}


class OfAProcess(Fault):
    """Befalls one process of a kind."""

    kind: str

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(_KINDS[self.kind]),)

    async def apply(self, world: World) -> None:
        self.name_of_victim = await world.resolve(self.victims[0])
        world.note("victim", self.name_of_victim)
        if self.name_of_victim == REDIS:
            await self.hit_redis(world)
        else:
            await self.hit(world, self.name_of_victim)

    async def undo(self, world: World) -> None:
        if self.name_of_victim == REDIS:
            await self.mend_redis(world)
        else:
            await self.mend(world, self.name_of_victim)

    @abstractmethod
    async def hit(self, world: World, name: str) -> None: ...

    @abstractmethod
    async def hit_redis(self, world: World) -> None: ...

    async def mend(self, world: World, name: str) -> None:
        world.start(name)

    async def mend_redis(self, world: World) -> None:
        await world.redis.start()


class Kill(OfAProcess):
    """SIGKILL: no last word. It is started again when the fault is over."""

    async def hit(self, world: World, name: str) -> None:
        await world.kill(name)

    async def hit_redis(self, world: World) -> None:
        await asyncio.to_thread(world.redis.end, signal.SIGKILL)


class Freeze(OfAProcess):
    """SIGSTOP: connections stay open and nothing answers, as on a paused virtual machine."""

    async def hit(self, world: World, name: str) -> None:
        world[name].signal(signal.SIGSTOP)

    async def hit_redis(self, world: World) -> None:
        world.redis.send(signal.SIGSTOP)

    async def mend(self, world: World, name: str) -> None:
        if world[name].is_running:
            world[name].signal(signal.SIGCONT)

    async def mend_redis(self, world: World) -> None:
        world.redis.send(signal.SIGCONT)


class Stop(OfAProcess):
    """SIGTERM: it has to end by itself, in time and with 0, and is started again."""

    async def hit(self, world: World, name: str) -> None:
        world.held.add(name)
        member = world[name]
        if member.is_running:
            member.signal(signal.SIGTERM)

    async def hit_redis(self, world: World) -> None:
        await asyncio.to_thread(world.redis.end, signal.SIGTERM)

    async def mend(self, world: World, name: str) -> None:
        await world.ended(name, 30.0)
        world.start(name)


def _register() -> None:
    who = {
        "gateway": "a gateway",
        "leader": "the leader",
        "standby": "the standby",
        "agent": "an agent",
        "redis": "Redis",
    }
    ways = {"kill": (Kill, "killed"), "freeze": (Freeze, "frozen"), "stop": (Stop, "told to stop")}
    for way, (base, participle) in ways.items():
        for kind in _KINDS:
            promise = Promise(_AFTER[kind], _SERVED[way][kind])
            attributes = {
                "name": f"{way}-{kind}",
                "about": f"{who[kind]} is {participle}",
                "kind": kind,
                "promise": promise,
                "hold_s": (4.0, 8.0) if way == "freeze" else (2.0, 6.0),
            }
            fault(type(f"{base.__name__}{kind.title()}", (base,), attributes))


_register()
