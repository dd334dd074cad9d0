"""Networks between kinds of processes: cut, one-way, lossy, late, narrow."""

from __future__ import annotations

import random
from typing import ClassVar

from faults.base import AGENTS, GATEWAYS, NETWORK, REDIS, Fault, Promise, fault
from faults.world import SCHEDULERS, World

_PAIRS = (
    (SCHEDULERS, AGENTS),
    (GATEWAYS, AGENTS),
    (SCHEDULERS, GATEWAYS),
    (AGENTS, AGENTS),
    ((REDIS,), SCHEDULERS),
)


class OfALink(Fault):
    """Befalls the ways between one process and all of another kind, or just one other."""

    needs = frozenset({NETWORK})
    fewest: ClassVar[bool] = False
    """Only between two processes."""

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        these, those = draw.choice(_PAIRS)
        if these == (REDIS,):
            self.left, self.right = [REDIS], [draw.choice(those)]
        elif these is those:
            one, other = draw.sample(these, 2)
            self.left, self.right = [one], [other]
        else:
            # One of the many, and all it talks to; or two that cannot reach each other.
            self.right = [draw.choice(those)]
            self.left = list(these) if draw.random() < 0.5 else [draw.choice(these)]
        return tuple(self.right)

    def figures(self) -> list[str]:
        return [f"from and to {'+'.join(self.left)}"]

    async def undo(self, world: World) -> None:
        assert world.network is not None
        world.network.heal_between(self.left, self.right)


@fault
class Cut(OfALink):
    name = "cut"
    about = "nothing gets through between two kinds of processes"
    promise = Promise(8.0)

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.cut(self.left, self.right)


@fault
class CutThere(OfALink):
    name = "cut-one-way"
    about = "nothing gets through in one direction"
    promise = Promise(8.0)

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.cut(self.left, self.right, one_way=True)


@fault
class CutBack(OfALink):
    name = "cut-other-way"
    about = "nothing gets back in the other direction"
    promise = Promise(8.0)

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.cut(self.right, self.left, one_way=True)


@fault
class Loss(OfALink):
    name = "loss"
    about = "1 to 5 % of the packets are lost"
    promise = Promise(5.0, served_s=2.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self.share = draw.uniform(0.01, 0.05)
        return super().choose(draw)

    def figures(self) -> list[str]:
        return [*super().figures(), f"{100 * self.share:.1f} %"]

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.impair(self.left, self.right, loss=self.share)


@fault
class Delay(OfALink):
    name = "delay"
    about = "packets take 20 to 100 ms more"
    promise = Promise(5.0, served_s=2.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self.delay_s = draw.uniform(0.02, 0.1)
        return super().choose(draw)

    def figures(self) -> list[str]:
        return [*super().figures(), f"{1000 * self.delay_s:.0f} ms"]

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.impair(self.left, self.right, delay_s=self.delay_s)


@fault
class Narrow(OfALink):
    name = "narrow"
    about = "no more than 4 to 20 Mbit/s get through"
    promise = Promise(6.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self.megabits = draw.uniform(4.0, 20.0)
        return super().choose(draw)

    def figures(self) -> list[str]:
        return [*super().figures(), f"{self.megabits:.0f} Mbit/s"]

    async def apply(self, world: World) -> None:
        assert world.network is not None
        world.network.impair(self.left, self.right, bytes_per_s=self.megabits * 125_000)
