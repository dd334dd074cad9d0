"""Requests one at a time go by dispatch windows in a real cluster, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import catenary
from benchmarks.end_to_end import FEATURES, dense_model
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

pytestmark = pytest.mark.timeout(300)
ROWS = 300
SLO_MS = 60_000
"""Long enough to outlive the loss of any process."""


@asynccontextmanager
async def _cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, int]]:
    """Two agents, each of which can compute all of a model."""
    repository = ModelRepository(folder / "models")
    blocks = repository.block_table(dense_model(repository, "small", 64, 4)).blocks
    partition = {"blocks": [0, blocks], "agents": ["agent-0", "agent-1"]}
    plan = folder / "plan.json"
    pipelines = [{"batch": 4, "partitions": [partition]}]
    plan.write_text(json.dumps({"models": [{"name": "small", "pipelines": pipelines}]}))
    port = free_port()
    cluster = LocalCluster(
        ClusterOptions(
            agents=2,
            models=("small",),
            plan_file=plan,
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            # Longer than by default: this machine may stand still for longer than 20 ms.
            extra={"gateway": {"metrics_port": port}, "scheduler": {"dispatch_window_ms": 200.0}},
        )
    )
    try:
        await cluster.start()
        yield cluster, port
    finally:
        await cluster.stop()


def _by_window(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("catenary_window_requests_total")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


async def _asked(client: catenary.AsyncClient, row: np.ndarray) -> np.ndarray:
    answer = await client.infer("small", {"x": row}, slo_ms=SLO_MS, timeout_s=SLO_MS / 1000)
    return next(iter(answer.outputs.values()))


async def test_requests_go_by_windows_and_every_one_is_right_whoever_is_killed(
    tmp_path: Path,
) -> None:
    async with _cluster(tmp_path) as (cluster, port):
        rows = np.random.default_rng(3).normal(size=(ROWS, 1, FEATURES)).astype(np.float32)
        async with catenary.AsyncClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            right = await asyncio.gather(*(_asked(client, row) for row in rows))
            before = await asyncio.to_thread(_by_window, port)
            for number, row in enumerate(rows):
                victim = {100: "agent-0", 200: "scheduler"}.get(number)
                if victim is not None:
                    os.kill(cluster.children[victim].pid or 0, signal.SIGKILL)
                answer = await _asked(client, row)
                np.testing.assert_allclose(answer, right[number], rtol=1e-2, atol=1e-2)
            by_window = await asyncio.to_thread(_by_window, port) - before
    assert by_window > ROWS / 4
