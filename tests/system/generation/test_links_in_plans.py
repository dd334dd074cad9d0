"""Agents at places of their own: plans go by the links that they measured, and follow them.

Every process is in a network namespace of its own; the round trips between agents are a switch's. The
agents are emulated, so that what a session takes is known but for the network and its ends.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

import catenary
import figures
from catenary_lab.live.chains.emulation import KEY, write_decoder
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.chains.anchors import read_anchors, rtt_ms
from catenaryd.local.local_cluster import free_port
from cluster_harness import ROOT
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import FaultCluster, running, until
from machine_faults.namespaces import VirtualNetwork, virtual_network

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

AGENTS = ("agent-0", "agent-1", "agent-2")
ANCHORS = ROOT / "tests" / "data" / "chain" / "ripe_anchors_eu.csv"
BLOCKS, BLOCK_BYTES, SESSION_TOKENS = 8, 10**9, 256
CACHE_BYTES_PER_TOKEN = 10**6
"""Of a block: an agent has room for four blocks and two sessions, or for three blocks and more."""
MEMORY_BYTES = 6_500_000_000
DECODE_NS, PREFILL_TOKEN_NS = 5_000_000, 50_000
"""Of a block."""
PROMPT_TOKENS, ANSWER_TOKENS = 32, 40
LOOK_S = 2.0
LONG_S = 120.0
NEAR = 0.05
"""Share by which live and planned times may differ."""
DEGRADED_MS = 200.0
_BINDS = re.compile(r"the link that binds .* takes [\d.]+ s of its ([\d.]+) s .*measured")


def set_apart(network: VirtualNetwork, round_trips_ms: dict[frozenset[str], float]) -> None:
    """Puts pairs of agents so far from each other."""
    for pair, round_trip_ms in round_trips_ms.items():
        one, other = sorted(pair)
        network.impair([one], [other], delay_s=round_trip_ms / 2e3)


@dataclass(frozen=True)
class Linked:
    """A cluster whose scheduler composes chains by itself."""

    client: catenary.AsyncClient

    async def plan(self) -> tuple[str, dict[str, Any]]:
        """Returns the plan in force with how it came about; both are empty if there is none."""
        try:
            plan = await self.client.plan()
        except catenary.CatenaryError:
            return "", {"models": []}
        return plan.explanation, plan.document

    async def passed(self) -> set[frozenset[str]]:
        """Returns the pairs of agents that follow each other in a ring of the plan in force."""
        rings = [
            [hop["agent"] for hop in chain["hops"]]
            for model in (await self.plan())[1]["models"]
            for chain in model.get("chains", ())
        ]
        return {frozenset(pair) for ring in rings for pair in pairwise([ring[-1], *ring])}

    async def round_trips_ms(self) -> dict[tuple[str, str], float]:
        """Returns the round trips that were measured, by where they begin and turn round."""
        status = await self.client.status()
        return {
            (link.source_server_id, link.target_server_id): link.round_trip_ns / 1e6
            for link in status.links
        }

    async def are_known(self, round_trips_ms: dict[frozenset[str], float]) -> bool:
        """True if every link is known as it is now, in both directions."""
        found = await self.round_trips_ms()
        return all(
            wanted <= found.get((one, other), 0.0) <= wanted + max(5.0, wanted / 4)
            for pair, wanted in round_trips_ms.items()
            for one, other in permutations(pair)
        )

    async def session_s(self) -> float:
        """Returns the seconds of a lone session, to its last token at the client."""
        began_s = time.monotonic()
        prompt = [1 + place % 200 for place in range(PROMPT_TOKENS)]
        session = self.client.generate(
            KEY.name,
            prompt,
            stream=True,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            timeout_s=LONG_S,
        )
        assert [token async for token in session]
        return time.monotonic() - began_s


def ripe_round_trips_ms() -> dict[frozenset[str], float]:
    """Returns the round trips between three places in Europe."""
    anchors = read_anchors(ANCHORS)
    places = dict(zip(AGENTS, (anchors[0], anchors[80], anchors[200]), strict=True))
    return {
        frozenset((one, other)): rtt_ms(places[one], places[other])
        for one, other in combinations(AGENTS, 2)
    }


@pytest.fixture
def network() -> Iterator[VirtualNetwork]:
    with virtual_network(["scheduler-0", "gateway-0", *AGENTS]) as made:
        yield made


@asynccontextmanager
async def linked(folder: Path, network: VirtualNetwork) -> AsyncIterator[Linked]:
    """Runs a scheduler, a gateway and three agents, none of which shares memory with another."""
    repository = folder / "models"
    write_decoder(
        ModelRepository(repository),
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
        cache_bytes_per_token=CACHE_BYTES_PER_TOKEN,
        session_tokens=SESSION_TOKENS,
    )
    times = folder / "times.json"
    emulated = {"prefill_token_ns": PREFILL_TOKEN_NS, "decode_ns": DECODE_NS}
    times.write_text(json.dumps({KEY.name: emulated}))
    lines = [*STATE, f"bind 127.0.0.1 {network.address}", "protected-mode no"]
    redis = RedisServer(folder / "redis", lines)
    await redis.start()
    cluster = FaultCluster(folder, {}, network.places)
    cluster.repository = repository
    host, port = cluster.place("scheduler-0").host, free_port()
    schedulers = [f"{host}:{port}"]
    planning = {
        "expected_agents": len(AGENTS),
        "expected_prompt_tokens": PROMPT_TOKENS,
        "expected_output_tokens": ANSWER_TOKENS,
        "replan_lasting_s": 1.0,
        "replan_interval_s": 1.0,
        "link_look_s": LOOK_S,
    }
    cluster.add(
        "scheduler",
        "scheduler-0",
        {
            "scheduler_id": "scheduler-0",
            "host": host,
            "port": port,
            "control_port": 0,
            "models": [KEY.name],
            "redis_url": redis.url.replace("127.0.0.1", network.address),
            **planning,
        },
    )
    common = {
        "scheduler_addresses": schedulers,
        "runtime_dir": folder / "run",
        "transports": ["tcp"],
    }
    host = cluster.place("gateway-0").host
    ports = {each: free_port() for each in ("grpc_port", "http_port", "admin_port")}
    where = {"gateway_id": "gateway-0", "host": host, "transport_host": host}
    cluster.add("gateway", "gateway-0", {**where, **ports, **common})
    for name in AGENTS:
        device = {"device": "emulated:any", "emulated_profile": times, "threads": 1}
        where = {"agent_id": name, "transport_host": cluster.place(name).host}
        cluster.add("agent", name, {**where, **device, "memory_bytes": MEMORY_BYTES, **common})
    try:
        async with running(cluster), cluster.client() as client:
            yield Linked(client)
    finally:
        redis.end()


async def test_a_session_takes_what_is_planned_by_the_links_between_places(
    tmp_path: Path, network: VirtualNetwork
) -> None:
    round_trips_ms = ripe_round_trips_ms()
    set_apart(network, round_trips_ms)
    async with linked(tmp_path, network) as here:

        async def is_planned() -> bool:
            known = await here.are_known(round_trips_ms)
            return known and _BINDS.search((await here.plan())[0]) is not None

        await until(is_planned, LONG_S, "a plan by all links")
        for (one, other), found_ms in (await here.round_trips_ms()).items():
            wanted = f"{round_trips_ms[frozenset((one, other))]:.1f}"
            figures.report("links in plans", f"{one} to {other}", found_ms, "ms", wanted)
        binds = _BINDS.search((await here.plan())[0])
        assert binds is not None
        planned_s, took_s = float(binds[1]), list[float]()

        async def is_as_planned() -> bool:
            """True if a session was no longer than planned: others on this machine lengthen it."""
            took_s.append(await here.session_s())
            return took_s[-1] <= (1 + NEAR) * planned_s

        try:
            await until(is_as_planned, LONG_S, "a session as long as planned")
        finally:
            for each in took_s:
                figures.report("links in plans", "live over planned", each / planned_s, "times")
        assert min(took_s) >= (1 - NEAR) * planned_s


async def test_a_plan_goes_round_a_link_that_degrades(
    tmp_path: Path, network: VirtualNetwork
) -> None:
    async with linked(tmp_path, network) as here:

        async def are_measured() -> bool:
            return len(await here.round_trips_ms()) == 6 and bool(await here.passed())

        await until(are_measured, LONG_S, "all links are measured")
        pair = min(await here.passed(), key=sorted)
        began_s = time.monotonic()
        set_apart(network, {pair: DEGRADED_MS})

        async def goes_round() -> bool:
            passed = await here.passed()
            return bool(passed) and pair not in passed

        await until(goes_round, LONG_S, "another plan")
        figures.report("links in plans", "another plan after", time.monotonic() - began_s, "s")
        assert "the link from" in (await here.plan())[0]
        assert await here.session_s() > 0
