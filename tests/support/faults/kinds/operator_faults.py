"""What operators do to a cluster that serves: drain, plan anew, deploy again."""

from __future__ import annotations

import random

import catenary
from fault_cluster import IMAGES
from faults.base import Fault, Promise, fault
from faults.kinds.agent_faults import OfAnAgent
from faults.world import World

_TIMEOUT_S = 30.0


class Operation(Fault):
    """An operator's command; one that is refused says why, which is no failure of the fault."""

    hold_s = (1.0, 3.0)

    async def command(self, world: World, coroutine) -> None:  # type: ignore[no-untyped-def]
        try:
            world.note("operator", "", answer=str(await coroutine)[:200])
        except catenary.CatenaryError as error:
            world.note("operator", "", refused=f"{error.reason}: {error.message}"[:300])


@fault
class Drain(OfAnAgent, Operation):
    name = "drain"
    about = "an agent is drained, and started anew"
    promise = Promise(20.0, served_s=2.0)
    hold_s = (4.0, 8.0)

    async def apply(self, world: World) -> None:
        world.held.add(self.agent)  # an agent that is drained may end
        await self.command(world, world.admin.drain(self.agent, timeout_s=_TIMEOUT_S))

    async def undo(self, world: World) -> None:
        await world.kill(self.agent)  # another incarnation is not meant
        world.start(self.agent)


@fault
class Replan(Operation):
    name = "replan"
    about = "the cluster plans anew, then gets its old plan again"
    promise = Promise(15.0, served_s=3.0)
    hold_s = (2.0, 4.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return ("plan",)

    async def apply(self, world: World) -> None:
        await self.command(world, world.admin.replan(timeout_s=_TIMEOUT_S))

    async def undo(self, world: World) -> None:
        await self.command(world, world.admin.apply_plan(world.plan, timeout_s=_TIMEOUT_S))


@fault
class Redeploy(Operation):
    name = "redeploy"
    about = "a model that is served is deployed once more, then the old plan is applied"
    promise = Promise(15.0, served_s=3.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return ("plan",)

    async def apply(self, world: World) -> None:
        await self.command(world, world.admin.deploy(IMAGES, timeout_s=_TIMEOUT_S))

    async def undo(self, world: World) -> None:
        await self.command(world, world.admin.apply_plan(world.plan, timeout_s=_TIMEOUT_S))
