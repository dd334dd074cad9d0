"""Requests one at a time go by dispatch windows in a real cluster, and others come between them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import catenary
from benchmarks.end_to_end import FEATURES, dense_model, pipeline_of
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

pytestmark = pytest.mark.timeout(300)
BATCHES = 200


@asynccontextmanager
async def _cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, int]]:
    repository = ModelRepository(folder / "models")
    blocks = repository.block_table(dense_model(repository, "small", 64, 4)).blocks
    half = blocks // 2
    stages = [[0, half], [half, blocks]]
    plan = folder / "plan.json"
    models = [{"name": "small", "pipelines": [pipeline_of(stages, 4)]}]
    plan.write_text(json.dumps({"models": models}))
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


async def test_requests_one_at_a_time_go_by_windows_and_are_right(tmp_path: Path) -> None:
    async with _cluster(tmp_path) as (cluster, port):
        rows = np.random.default_rng(3).normal(size=(BATCHES, 1, FEATURES)).astype(np.float32)
        async with catenary.AsyncClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            alone = []
            for row in rows:
                answer = await client.infer("small", {"x": row})
                alone.append(next(iter(answer.outputs.values())))
            by_window = await asyncio.to_thread(_by_window, port)
            assert by_window > BATCHES / 4
            together = await asyncio.gather(*(client.infer("small", {"x": row}) for row in rows))
        for one, answer in zip(alone, together, strict=True):
            np.testing.assert_allclose(
                one, next(iter(answer.outputs.values())), rtol=1e-2, atol=1e-2
            )
