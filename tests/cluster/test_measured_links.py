"""Agents of two machines measure the links between them without being asked by anybody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import catenary
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from cluster_harness import wait_until

FAST_BYTES_PER_SECOND, SLOW_BYTES_PER_SECOND = 50_000_000, 5_000_000


async def test_operators_see_links_as_slow_as_they_are(tmp_path: Path) -> None:
    each = tuple(
        {
            "agent_id": f"agent-{number}",
            "transports": ["tcp"],
            "emulated_link": True,
            "link_bytes_per_second": rate,
        }
        for number, rate in enumerate((FAST_BYTES_PER_SECOND, SLOW_BYTES_PER_SECOND))
    )
    options = ClusterOptions(
        2, device="emulated:L4", grpc_port=0, http_port=0, data_dir=tmp_path, each_agent=each
    )
    cluster = LocalCluster(options)
    try:
        await cluster.start()
        address = f"127.0.0.1:{cluster.grpc_port}"
        with catenary.Client(address, admin_target=cluster.admin_target) as client:

            def links() -> dict[tuple[str, str], catenary.LinkInfo]:
                found = [link for machine in client.machines() for link in machine.links]
                return {(each.source_server_id, each.target_server_id): each for each in found}

            def both() -> bool:
                return len(links()) == 2

            await asyncio.to_thread(wait_until, both, 120.0, "both links are measured")
            measured = await asyncio.to_thread(links)
    finally:
        await cluster.stop()
    # Each agent receives at its own rate, and what else this machine does makes nothing faster.
    for source, target, rate in (
        ("agent-0", "agent-1", SLOW_BYTES_PER_SECOND),
        ("agent-1", "agent-0", FAST_BYTES_PER_SECOND),
    ):
        found = measured[source, target]
        assert 0 < found.bytes_per_second <= rate
        assert 0 < found.round_trip_ns < 60 * 10**9
