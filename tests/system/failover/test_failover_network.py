"""Networks that fail: an agent without its scheduler, two agents without each other, bad links.

Every process is in a network namespace of its own; what lies between them is cut, made one-way,
slow or lossy while requests come.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import catenary
import figures
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import (
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    ready,
    status_or_none,
    until,
    until_status,
)
from machine_faults.fault_load import Load, Shape, prepared_load
from machine_faults.namespaces import VirtualNetwork, virtual_network

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SCHEDULERS = ["scheduler-0", "scheduler-1"]
AGENTS = [f"agent-{number}" for number in range(5)]
EVERYBODY = [*SCHEDULERS, "gateway-0", *AGENTS]
BEFORE_S, AFTER_S = 2.0, 5.0
SILENCE_S = 3.0
LOST_LIMIT_S = SILENCE_S + 2.0
BACK_LIMIT_S = 5.0
SHAPE = Shape(images_per_s=4.0, texts_per_s=0.7)


@dataclass
class World:
    """A cluster, its network, and who watches it."""

    cluster: FaultCluster
    network: VirtualNetwork
    client: catenary.AsyncClient
    load: Load

    async def state_of(self, agent: str) -> str:
        status = await status_or_none(self.client)
        states = {each.agent_id: each.state for each in status.agents} if status else {}
        return states.get(agent, "")

    async def until_state(self, agent: str, state: str, timeout_s: float) -> float:
        async def there() -> bool:
            return await self.state_of(agent) == state

        return await until(there, timeout_s, f"{agent} being {state}")


@pytest.fixture
def network() -> Iterator[VirtualNetwork]:
    with virtual_network(EVERYBODY) as made:
        yield made


@asynccontextmanager
async def world(folder: Path, network: VirtualNetwork) -> AsyncIterator[World]:
    server = RedisServer(
        folder / "redis", [*STATE, f"bind 127.0.0.1 {network.address}", "protected-mode no"]
    )
    await server.start()
    redis = {"redis_url": server.url.replace("127.0.0.1", network.address)}
    tcp = {"transports": ["tcp"]}  # shared memory would get through any cut
    try:
        async with (
            fault_cluster(
                folder, redis, places=network.places, overrides={"gateway": tcp, "agent": tcp}
            ) as cluster,
            cluster.client() as client,
            prepared_load(cluster, SHAPE) as load,
        ):
            yield World(cluster, network, client, load)
    finally:
        server.end()


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "only its reports"])
async def test_an_agent_without_a_scheduler_is_replaced_and_comes_back(
    tmp_path: Path, network: VirtualNetwork, one_way: bool
) -> None:
    test = f"partition scheduler/agents {'one way' if one_way else 'both ways'}"
    async with world(tmp_path, network) as here:
        load = here.load
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            # One that classifies images, and one in the middle of texts.
            network.cut(["agent-1", "agent-2"], SCHEDULERS, one_way=one_way)
            lost_s = await here.until_state("agent-1", "lost", LOST_LIMIT_S + 5)
            await here.until_state("agent-2", "lost", LOST_LIMIT_S + 5)
            await load.for_s(AFTER_S)
            healed_s = load.now_s
            network.heal()
            back_s = await here.until_state("agent-1", "ready", 20.0)
            await here.until_state("agent-2", "ready", 20.0)
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "taken as lost after", lost_s, "s", f"<= {LOST_LIMIT_S:g}")
        figures.report(test, "back after healing", back_s, "s", f"<= {BACK_LIMIT_S:g}")
        load.nothing_was_lost()
        assert lost_s <= LOST_LIMIT_S
        assert back_s <= BACK_LIMIT_S
        served = [o for o in load.of("image", healed_s + back_s) if not o.error]
        assert served, "nothing was asked for after healing"
        await nothing_is_booked(here.client)


async def test_two_agents_without_each_other_are_gone_around(
    tmp_path: Path, network: VirtualNetwork
) -> None:
    """Only the way of feature maps and hidden states is cut: everybody is there and ready."""
    test = "partition agent/agent"
    async with world(tmp_path, network) as here:
        load = here.load
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            network.cut(["agent-0"], ["agent-1"])
            network.cut(["agent-2"], ["agent-3"])
            await load.for_s(12.0)
            settled_s = load.now_s - 6.0
            network.heal()
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        settled = load.of("image", settled_s, settled_s + 5.0)
        slow = max(o.took_s for o in settled)
        figures.report(test, "longest answer once it is known", slow, "s", "<= 2.5")
        load.nothing_was_lost()
        assert slow <= 2.5
        await nothing_is_booked(here.client)


async def test_bad_links_are_slow_and_nothing_else(tmp_path: Path, network: VirtualNetwork) -> None:
    test = "1 % loss, 50 ms delay"
    async with world(tmp_path, network) as here:
        load = here.load
        before = await until_status(here.client, lambda status: bool(status.scheduler_id), 5.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            bad = ["agent-1", "agent-4"]
            others = [each for each in EVERYBODY if each not in bad]
            network.impair(bad, others, loss=0.01, delay_s=0.05)
            await load.for_s(12.0)
            states = {agent: await here.state_of(agent) for agent in AGENTS}
            network.heal()
            await load.for_s(3.0)
        load.report(test, fault_s)
        load.nothing_was_lost()
        assert set(states.values()) == {"ready"}, states
        after = await ready(here.cluster, 10.0)
        assert after.epoch == before.epoch
        await nothing_is_booked(here.client)


async def test_a_scheduler_cut_off_from_everybody_is_replaced(
    tmp_path: Path, network: VirtualNetwork
) -> None:
    """It cannot renew its lease; when it is back it has to obey whoever leads now."""
    test = "partition scheduler/all"
    async with world(tmp_path, network) as here:
        load, client = here.load, here.client
        before = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        old = before.scheduler_id
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            rest = [each for each in EVERYBODY if each != old]
            network.cut([old], [*rest, "test"])
            began_s = time.monotonic()
            after = await until_status(
                client, lambda s: bool(s.scheduler_id) and s.scheduler_id != old, 20.0
            )
            taken_s = time.monotonic() - began_s
            await load.for_s(AFTER_S)
            network.heal()
            await load.for_s(AFTER_S)
            last = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        load.report(test, fault_s)
        figures.report(test, "standby leads after", taken_s, "s", "<= 6")
        load.nothing_was_lost()
        assert taken_s <= 6.0
        assert (last.scheduler_id, last.epoch) == (after.scheduler_id, after.epoch)
        assert after.epoch > before.epoch
        await nothing_is_booked(client)
