"""`catenaryd up --model` with a source: it is imported before the cluster starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from catenary_services.errors import InvalidInput, RequestCancelled
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from catenaryd.running import prepared
from shared_helpers.model_mirror import model_mirror
from source_roots import IMPORT_PATH


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return LocalCluster(ClusterOptions(data_dir=tmp_path / "data", grpc_port=0, http_port=0))


async def test_a_signal_ends_an_import_that_is_under_way(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = asyncio.Event()
    with model_mirror() as mirror:
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        mirror.add("org/tiny", {"a.gguf": bytes(3_000_000)})
        mirror.breaks["a.gguf"] = [100_000]
        mirror.stalls.add("a.gguf")
        preparing = asyncio.create_task(prepared(cluster, "hf:org/tiny", stop, print))
        async with asyncio.timeout(120):
            while mirror.sent["a.gguf"] < 100_000:
                await asyncio.sleep(0.05)
        stop.set()
        with pytest.raises(RequestCancelled, match=r"hf:org/tiny: stopped .* is kept"):
            await preparing


async def test_a_source_that_is_none_is_refused_before_anything_starts(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"source: .*/none does not exist"):
        await prepared(cluster, str(tmp_path / "none"), asyncio.Event(), print)
    assert not cluster.children
