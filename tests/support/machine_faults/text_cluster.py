"""Emulated agents that tell texts, with their scheduler and gateway, in namespaces of their own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from catenaryd.local.local_cluster import free_port
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import TEXTS, FaultCluster, running
from machine_faults.namespaces import VirtualNetwork

SCHEDULER, GATEWAY = "scheduler-0", "gateway-0"


@asynccontextmanager
async def texts_over(
    chains: list[dict[str, Any]],
    folder: Path,
    network: VirtualNetwork,
    *,
    repository: Path | None = None,
    prefill_token_ns: int = 20_000,
    overrides: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> AsyncIterator[FaultCluster]:
    """Runs a scheduler, a gateway and the agents of some chains, each in a namespace of its own.

    Args:
        chains: The chains of the model `TEXTS`, as in a plan.
        folder: The folder of everything.
        network: The namespaces.
        repository: Its models; None for the shared ones.
        prefill_token_ns: The time of a token of a prompt in one block.
        overrides: Further settings by kind of process.
    """
    server = RedisServer(
        folder / "redis", [*STATE, f"bind 127.0.0.1 {network.address}", "protected-mode no"]
    )
    await server.start()
    url = server.url.replace("127.0.0.1", network.address)
    cluster = FaultCluster(folder, {"redis_url": url}, network.places)
    if repository is not None:
        cluster.repository = repository
    plan, times = folder / "plan.json", folder / "times.json"
    plan.write_text(json.dumps({"models": [{"name": TEXTS, "chains": chains}]}))
    step = {
        "prefill_ns": 1_000_000,
        "prefill_token_ns": prefill_token_ns,
        "decode_ns": 4_000_000,
        "decode_session_ns": 10_000,
    }
    times.write_text(json.dumps({TEXTS: step}))
    used = sorted({hop["agent"] for chain in chains for hop in chain["hops"]})
    address = cluster.scheduler_addresses[0]
    tcp = {"transports": ["tcp"], "scheduler_addresses": [address], "runtime_dir": folder / "run"}
    place = cluster.place
    cluster.add(
        "scheduler",
        SCHEDULER,
        {
            "scheduler_id": SCHEDULER,
            "host": place(SCHEDULER).host,
            "models": [TEXTS],
            "port": int(address.rpartition(":")[2]),
            "control_port": 0,
            "plan_file": plan,
            "expected_agents": len(used),
            "redis_url": url,
            **overrides.get("scheduler", {}),
        },
    )
    cluster.add(
        "gateway",
        GATEWAY,
        {
            "gateway_id": GATEWAY,
            "host": place(GATEWAY).host,
            "transport_host": place(GATEWAY).host,
            "grpc_port": free_port(),
            "http_port": free_port(),
            "admin_port": free_port(),
            **tcp,
        },
    )
    for name in used:
        cluster.add(
            "agent",
            name,
            {
                "agent_id": name,
                "transport_host": place(name).host,
                "threads": 1,
                "host_devices": len(used),
                "device": "emulated:text",
                "emulated_profile": times,
                **tcp,
                **overrides.get("agent", {}),
            },
        )
    try:
        async with running(cluster, used):
            yield cluster
    finally:
        server.end()
