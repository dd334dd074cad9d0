"""Real leaks in a real cluster: what nobody holds, or nobody wants, is given back by audits.

A ring of two agents generates with SmolLM2 on CPUs. Gateways are killed with streams running, a
gateway that lies is let in, and rows of the past are put into Redis before another scheduler leads.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
import redis

import catenary
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc, scheduler_pb2
from catenary_scheduler.storage.keys import RedisKeys
from cluster_harness import RunningCluster, redis_pid, running_cluster
from language_model import install
from scheduler_harness import FakeGateway, until
from small_models.prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MODEL = "smollm2-135m"
TOKENS = 24
STREAMS = 6
INTERVAL_S, GRACE_S, CLAIMS_S = 1.5, 1.0, 10.0
PLACEMENT = {
    "models": [
        {
            "name": MODEL,
            "chains": [
                {
                    "capacity": 8,
                    "hops": [
                        {"agent": "agent-0", "blocks": [0, 15]},
                        {"agent": "agent-1", "blocks": [15, 30]},
                    ],
                }
            ],
        }
    ]
}
CONFIG = {
    "agent": {"threads": 1},
    "scheduler": {"audit_interval_s": INTERVAL_S, "audit_grace_s": GRACE_S},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("audit")
    install(folder / "models")
    with running_cluster(
        folder, models=(MODEL,), placement=PLACEMENT, agents=2, config=CONFIG, schedulers=2
    ) as running:
        yield running


async def stream(stub: generation_pb2_grpc.GenerationStub, prompt: str) -> str:
    """Returns how an answer ended: its length, or the error."""
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        messages=[generation_pb2.ChatMessage(role="user", content=prompt)],
        sampling=generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True),
    )
    tokens = 0
    try:
        async for response in stub.Generate(request, timeout=120):
            tokens += len(response.token_ids)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return str(tokens)


async def streams(target: str, count: int = STREAMS) -> list[str]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return list(await asyncio.gather(*(stream(stub, each) for each in PROMPTS[:count])))


async def running_sessions(cluster: RunningCluster, count: int) -> None:
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        async with asyncio.timeout(60):
            while (await client.status()).sessions_in_flight < count:
                await asyncio.sleep(0.05)


async def test_audits_leave_running_streams_alone(cluster: RunningCluster) -> None:
    assert await streams(cluster.grpc) == [str(TOKENS)] * STREAMS
    status = await asyncio.to_thread(cluster.assert_idle_book, "audits beside streams")
    assert status.audits >= 2
    assert status.leaks_mended == 0


async def test_a_gateway_killed_with_streams_leaves_nothing_in_the_book(
    cluster: RunningCluster,
) -> None:
    asking = asyncio.create_task(streams(cluster.grpc))
    await running_sessions(cluster, STREAMS)
    cluster.kill("gateway")
    assert set(await asking) == {"UNAVAILABLE"}
    await asyncio.to_thread(cluster.assert_idle_book, "kill -9 gateway")


async def test_what_a_lying_gateway_leaves_behind_is_given_back(cluster: RunningCluster) -> None:
    """It starts sessions that it never opens, says that it did, then that it wants none."""
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        leader = (await client.status()).scheduler_id
    liar = FakeGateway(cluster.scheduler_port(leader), "liar")
    await liar.start()
    asking = asyncio.create_task(streams(cluster.grpc, 2))
    await until(lambda: liar.serves(MODEL), "it is told of the model", 30.0)
    for number in (1, 2):
        await liar.submit_session(number, model=MODEL, max_tokens=16, budget_ns=600 * 10**9)
        await liar.started(number)
    beating = asyncio.create_task(beats(liar))
    liar.waits = {number: (liar.starts(number)[-1].session_id,) for number in (1, 2)}
    for number in (1, 2):
        await liar.started(number, times=2)  # the first ones were found to be nowhere
    liar.waits = {}
    status = await asyncio.to_thread(cluster.assert_idle_book, "a gateway that lies")
    assert await asking == [str(TOKENS)] * 2
    assert status.leaks_mended >= 4
    beating.cancel()
    await liar.close()


async def test_rows_of_the_past_in_redis_are_found_by_the_next_leader(
    cluster: RunningCluster,
) -> None:
    asking = asyncio.create_task(streams(cluster.grpc, 3))
    await running_sessions(cluster, 3)
    put_stale_rows(cluster)
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        leader = (await client.status()).scheduler_id
    cluster.kill(leader)
    assert await asking == [str(TOKENS)] * 3
    status = await asyncio.to_thread(
        cluster.assert_idle_book, "stale rows in Redis", CLAIMS_S + 6 * INTERVAL_S + 20.0
    )
    assert status.scheduler_id != leader
    assert status.leaks_mended >= 2
    assert status.quarantined_records >= 2


def put_stale_rows(cluster: RunningCluster) -> None:
    """Writes reservations that nobody holds, as if a copy of Redis had been put back.

    Two could be true; one is of an agent that does not exist, and one lies a year ahead.
    """
    assert redis_pid(cluster.data_dir)
    known = json.loads(next((cluster.data_dir / "redis").glob("*.json")).read_text())
    client: Any = redis.Redis(port=known["port"], password=known["password"])
    keys, second_ns = RedisKeys("main"), 10**9
    soon_ns, year_ns = time.monotonic_ns() + 1800 * second_ns, 365 * 86_400 * second_ns
    rows = (
        ("gpu/agent-0", 77, soon_ns),
        ("gpu/agent-0", 78, soon_ns + 2 * second_ns),
        ("gpu/agent-0", 79, soon_ns + year_ns),
        ("gpu/agent-gone", 80, soon_ns),
    )
    for resource, number, start_ns in rows:
        client.hset(keys.table("resources"), resource, "1")
        row = f"{start_ns} {start_ns + second_ns} {start_ns + 600 * second_ns} 0"
        client.hset(keys.table(f"book:{resource}"), f"{number}:0", row)
    client.close()


async def beats(gateway: FakeGateway) -> None:
    while True:
        beat = scheduler_pb2.GatewayMessage(heartbeat=scheduler_pb2.Heartbeat())
        await gateway.send(beat)
        await asyncio.sleep(0.5)
