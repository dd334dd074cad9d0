"""Statistics are sums of what happened."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from catenary_services.security.key_file import add_key
from gateway_harness import Down, Stage, stage
from shared_helpers.triton_clients import TritonClient, triton_client
from shared_helpers.waiting import until

X = np.ones((3, 4), np.float32)


async def told(client: TritonClient, model: str = "toy") -> dict[str, Any]:
    (found,) = (await client.call("get_inference_statistics", model))["model_stats"]
    return found


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {name: each["count"] for name, each in found["inference_stats"].items()}


async def settled(client: TritonClient, place: Stage, requests: int) -> dict[str, Any]:
    """The statistics once so many requests are in them: they are counted after the answer."""
    metrics = place.gateway._plane.request_metrics
    await until(lambda: sum(metrics.counts("toy:1")) >= requests, "they are counted")
    return await told(client)


async def test_nothing_has_happened_yet(client: TritonClient) -> None:
    found = await told(client)
    assert (found["inference_count"], found["execution_count"], found["last_inference"]) == (
        0,
        0,
        0,
    )
    assert not found["batch_stats"]
    assert not any(counts(found).values())


async def test_answers_and_failures_are_counted_with_their_times(
    client: TritonClient, sharing: Stage
) -> None:
    before_ms = time.time_ns() // 1_000_000
    for _ in range(2):
        await client.call("infer", "toy", [client.input("in_0", X)])
    sharing.agent.hold = True
    with pytest.raises(InferenceServerException):
        await client.call("infer", "toy", [client.input("in_0", X)], timeout=60_000)
    with pytest.raises(InferenceServerException):
        await client.call("infer", "toy", [client.input("in_0", X[:, :2].copy())])
    found = await settled(client, sharing, 4)
    stats = found["inference_stats"]
    assert (found["inference_count"], found["execution_count"]) == (6, 2)
    assert before_ms <= found["last_inference"] <= time.time_ns() // 1_000_000
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert counts(found) == {"success": 2, "fail": 2, **dict.fromkeys(parts, 2)}
    # The scripted agent says that its rows waited for 1000 ns and were computed for 2000 ns.
    assert stats["compute_infer"]["ns"] == 2 * 2000
    assert stats["queue"]["ns"] >= 2 * 1000
    assert sum(stats[part]["ns"] for part in parts) <= stats["success"]["ns"]
    assert stats["fail"]["ns"] > 50_000_000
    (batch,) = found["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]) == (3, {"count": 2, "ns": 4000})


async def test_a_batch_of_two_requests_is_one_execution(sharing: Stage) -> None:
    waiting: list[int] = []

    def both(submit: Any) -> list[Down]:
        waiting.append(submit.request_id)
        if len(waiting) < 2:
            return []
        return [sharing.scheduler.batch([(waiting[0], 0, 3, 0), (waiting[1], 0, 3, 3)])]

    sharing.scheduler.script = both
    async with triton_client("grpc.aio", sharing.grpc, sharing.http) as client:
        given = [client.input("in_0", X)]
        await asyncio.gather(*(client.call("infer", "toy", given) for _ in range(2)))
        found = await settled(client, sharing, 2)
    assert (found["inference_count"], found["execution_count"]) == (6, 1)
    (batch,) = found["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (6, 1)
    assert found["inference_stats"]["compute_infer"] == {"count": 2, "ns": 4000}


async def test_all_models_or_one_version(client: TritonClient) -> None:
    everything = (await client.call("get_inference_statistics"))["model_stats"]
    assert {"toy", "pair", "cold"} <= {each["name"] for each in everything}
    (one,) = (await client.call("get_inference_statistics", "toy", "1"))["model_stats"]
    assert (one["name"], one["version"]) == ("toy", "1")
    for model, version in (("toy", "9"), ("nobody", ""), ("nobody", "1")):
        with pytest.raises(InferenceServerException, match=r"no (model|version)"):
            await client.call("get_inference_statistics", model, version)


@pytest.mark.parametrize("form", ["grpc", "http"])
async def test_who_may_look_and_change(tmp_path: Path, form: str) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in ("infer", "view", "admin")}
    changes = [
        ("update_log_settings", {"log_info": False}),
        ("update_trace_settings", None, {"trace_rate": "1"}),
        ("load_model", "toy"),
        ("unload_model", "toy"),
    ]
    looks = [("get_inference_statistics",), ("get_log_settings",), ("get_trace_settings",)]
    async with stage(tmp_path, api_keys_file=file) as place:
        for scope, key in keys.items():
            async with triton_client(form, place.grpc, place.http, key) as client:
                await client.call("get_model_config", "toy")
                for call in looks + changes:
                    if scope == "admin" or (scope == "view" and call in looks):
                        await client.call(*call)
                        continue
                    with pytest.raises(InferenceServerException, match="scope"):
                        await client.call(*call)
        # The scheduler is given the operator's own key, and nobody else's.
        assert place.scheduler.presented == [f"Bearer {keys['admin']}"]
        assert place.scheduler.undeployed == ["toy"]
        async with triton_client(form, place.grpc, place.http) as nobody:
            for call in (*looks, *changes, ("get_model_config", "toy")):
                with pytest.raises(InferenceServerException, match="no API key"):
                    await nobody.call(*call)
