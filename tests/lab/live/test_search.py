"""Which load factors are tried on real processes, where each try takes a minute."""

from __future__ import annotations

import pytest

from catenary_lab.live.scenario import largest_factors
from catenary_lab.scenarios.pools.schema import Live

WANTED = Live(
    kind="live",
    title="search",
    instance="any",
    gpus={},
    dilation=1.0,
    step=0.05,
    highest=1.2,
    runs=4,
)


class Cluster:
    """Models that hold every factor up to their own."""

    def __init__(self, **holds: float) -> None:
        self.holds = holds
        self.tried: list[float] = []

    async def held_at(self, factor: float) -> list[str]:
        self.tried.append(factor)
        return [name for name, most in self.holds.items() if factor <= most]

    async def search(self, begin: float, wanted: Live = WANTED) -> dict[str, float]:
        return await largest_factors(self.held_at, list(self.holds), begin, wanted)


@pytest.mark.parametrize(
    ("holds", "begin", "found", "tried"),
    [
        (0.9, 0.9, 0.9, [0.9, 0.95]),
        (1.0, 0.9, 1.0, [0.9, 0.95, 1.0, 1.05]),
        (0.8, 0.9, 0.8, [0.9, 0.85, 0.8]),
        (0.1, 0.9, 0.0, [0.9, 0.85, 0.8, 0.75]),
        (2.0, 1.15, 1.2, [1.15, 1.2]),
        (0.04, 0.1, 0.0, [0.1, 0.05]),
        (0.5, 0.0, 0.2, [0.05, 0.1, 0.15, 0.2]),
    ],
)
async def test_one_model(holds: float, begin: float, found: float, tried: list[float]) -> None:
    cluster = Cluster(net=holds)
    assert await cluster.search(begin) == {"net": found}
    assert cluster.tried == tried


async def test_the_search_goes_down_until_every_model_has_held_one() -> None:
    cluster = Cluster(strong=0.9, weak=0.8)
    assert await cluster.search(0.9) == {"strong": 0.9, "weak": 0.8}
    assert cluster.tried == [0.9, 0.85, 0.8]


async def test_the_search_goes_up_while_every_model_holds() -> None:
    cluster = Cluster(strong=2.0, weak=0.9)
    assert await cluster.search(0.85) == {"strong": 0.95, "weak": 0.9}
    assert cluster.tried == [0.85, 0.9, 0.95]


async def test_a_luckier_run_at_less_load_takes_nothing_back() -> None:
    class Unlucky(Cluster):
        async def held_at(self, factor: float) -> list[str]:
            held = await super().held_at(factor)
            return held if factor != 0.9 else ["strong"]

    cluster = Unlucky(strong=0.95, weak=0.85)
    assert await cluster.search(0.95) == {"strong": 0.95, "weak": 0.85}
