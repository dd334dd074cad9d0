"""The counters that a live cluster reads from its agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from catenary_lab.live.cluster import EMULATED, LiveCluster
from catenary_services.errors import Unavailable
from catenary_services.telemetry.metrics import Metrics, start_metrics_server
from catenaryd.local.local_cluster import ClusterOptions

REQUESTS = "catenary_requests_total"


@pytest.fixture
def pages() -> Iterator[list[tuple[int, Callable[[], None]]]]:
    """Ports of the pages of two agents, and what ends each; they counted 5 and 7 requests."""
    made = []
    for count in (5, 7):
        metrics = Metrics(CollectorRegistry())
        metrics.requests.labels("m", "OK").inc(count - 1)
        metrics.requests.labels("m", "OVERLOADED").inc(1)
        made.append(start_metrics_server("127.0.0.1", 0, metrics.registry))
    yield made
    made[0][1]()


async def test_counters_are_summed_over_their_labels_for_each_agent(
    pages: list[tuple[int, Callable[[], None]]], tmp_path: Path
) -> None:
    agents = tuple({"metrics_port": port} for port, _ in pages)
    cluster = LiveCluster(ClusterOptions(2, each_agent=agents), tmp_path, EMULATED, {})
    assert await cluster.counted(REQUESTS) == [5.0, 7.0]
    pages[1][1]()
    with pytest.raises(Unavailable, match="metrics are not to be had"):
        await cluster.counted(REQUESTS)
