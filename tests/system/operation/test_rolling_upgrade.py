"""Every process is drained and replaced by a new one, one after the other, under load.

As Kubernetes does it: SIGTERM, wait for the end, start the next, wait until its probe says `ready`,
go on. Photographs are classified and streams of text run all the time, through the SDK with two
gateways and its usual retries. Gateways get less time to drain than an answer takes, so that
answers have to go on at the other gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import catenary
import figures
from catenary.rpc.attempts import RetryAttempts
from catenary_services.grpc.probes import LEADER, LIVE, READY
from catenaryd.local.local_cluster import free_port
from fault_cluster import FaultCluster, Member, fault_cluster, nothing_is_booked, ready, until
from machine_faults.fault_load import Load, Shape

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

TEST = "rolling upgrade"
GATEWAYS = ("gateway-0", "gateway-1")
SCHEDULERS = ("scheduler-0", "scheduler-1")
AGENTS = tuple(f"agent-{n}" for n in range(5))
SHAPE = Shape(images_per_s=4.0, texts_per_s=1.5)
GATEWAY_DRAIN_S = 1.0
"""An answer takes two and a half seconds."""
SETTLED_S = 1.0
"""As `minReadySeconds`."""
LONGEST_PAUSE_S = 8.0
LONGEST_STEP_S = 45.0
POLICY = catenary.RetryPolicy()


@dataclass(frozen=True)
class Step:
    """One process was replaced, in a span of time of the load."""

    name: str
    began_s: float
    ended_s: float


def members_with_probes() -> dict[str, dict[str, object]]:
    """Settings beyond the usual, by process."""
    overrides: dict[str, dict[str, object]] = {
        name: {"health_port": free_port()} for name in (*GATEWAYS, *SCHEDULERS, *AGENTS)
    }
    overrides["gateway"] = {"drain_timeout_s": GATEWAY_DRAIN_S}
    return overrides


async def says(member: Member, service: str) -> bool:
    """Asks a process as Kubernetes' probes do."""
    address = f"127.0.0.1:{member.settings['health_port']}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await stub.Check(request, timeout=1.0)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def replace(cluster: FaultCluster, load: Load, name: str) -> Step:
    """Drains a process, starts it anew and returns when it is ready."""
    member, began_s = cluster[name], load.now_s
    old = member.process
    assert old is not None
    await asyncio.to_thread(member.end)
    assert old.returncode == 0, f"{name} did not end well: {member.tail()}"
    member.start()
    await until(lambda: says(member, READY), 60.0, f"{name} being ready")
    assert await says(member, LIVE)
    await asyncio.sleep(SETTLED_S)
    return Step(name, began_s, load.now_s)


async def leader_first(cluster: FaultCluster) -> list[str]:
    leads = [name for name in SCHEDULERS if await says(cluster[name], LEADER)]
    assert len(leads) == 1
    return [*leads, *(name for name in SCHEDULERS if name not in leads)]


@contextmanager
def counted_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what the SDK sends again, by method."""
    seen: Counter[str] = Counter()
    again = RetryAttempts.again

    def counted(self: RetryAttempts) -> None:
        seen[self._call.method] += 1
        if getattr(self._call.request, "generated_token_ids", None):
            seen["answers that went on"] += 1
        again(self)

    with monkeypatch.context() as patched:
        patched.setattr(RetryAttempts, "again", counted)
        yield seen


def clients_of(cluster: FaultCluster, count: int) -> list[catenary.AsyncClient]:
    """Clients that know both gateways."""
    return [
        catenary.AsyncClient(
            [cluster.target(name) for name in GATEWAYS],
            admin_target=[cluster.admin(name) for name in GATEWAYS],
            insecure=True,
            retry=POLICY,
        )
        for _ in range(count)
    ]


def pauses(load: Load, steps: Sequence[Step]) -> dict[str, float]:
    """Returns the longest pause of any stream by the step in which it began."""
    longest = {step.name: 0.0 for step in steps}
    for outcome in load.of("text"):
        moments = [outcome.sent_s, *outcome.moments_s]
        for before_s, after_s in pairwise(moments):
            for step in steps:
                if step.began_s <= before_s < step.ended_s:
                    longest[step.name] = max(longest[step.name], after_s - before_s)
    return longest


async def test_every_process_is_replaced_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fault_cluster(tmp_path, gateways=2, overrides=members_with_probes()) as cluster:
        clients = clients_of(cluster, 4)
        load = Load(clients, SHAPE)
        await load.prepare()
        steps: list[Step] = []
        began_s = time.monotonic()
        first_pids = {name: member.pid for name, member in cluster.members.items()}
        with counted_attempts(monkeypatch) as attempts:
            async with load.running():
                await load.for_s(2.0)
                leader, standby = await leader_first(cluster)
                order = (*reversed(AGENTS), standby, leader, *GATEWAYS)
                for name in order:
                    steps.append(await replace(cluster, load, name))
                await load.for_s(2.0)
        total_s = time.monotonic() - began_s
        assert all(cluster[name].pid != pid for name, pid in first_pids.items())
        report(load, steps, attempts, total_s)
        load.nothing_was_lost()
        assert attempts["answers that went on"] > 0, "no answer outlasted its gateway"
        assert max(step.ended_s - step.began_s for step in steps) < LONGEST_STEP_S
        assert max(pauses(load, steps).values()) < LONGEST_PAUSE_S
        await ready(cluster)
        await nothing_is_booked(clients[0])
        status = await clients[0].status()
        assert {each.name for each in status.versions} == {*AGENTS, *GATEWAYS, status.scheduler_id}
        assert len({each.version for each in status.versions}) == 1
        for client in clients:
            await client.close()


async def test_a_gateway_that_is_killed_costs_no_answer_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fault_cluster(tmp_path, gateways=2, overrides=members_with_probes()) as cluster:
        clients = clients_of(cluster, 4)
        load = Load(clients, SHAPE)
        await load.prepare()
        with counted_attempts(monkeypatch) as attempts:
            async with load.running():
                for name in GATEWAYS:
                    await load.for_s(3.0)
                    cluster[name].kill()
                    cluster[name].start()
                    await until(lambda n=name: says(cluster[n], READY), 60.0, f"{name} being back")
                await load.for_s(2.0)
        figures.report("gateway killed", "answers that went on", attempts["answers that went on"])
        figures.report("gateway killed", "requests lost", sum(load.errors.values()), "", "= 0")
        load.nothing_was_lost()
        assert attempts["answers that went on"] > 0
        for client in clients:
            await client.close()


def report(load: Load, steps: Sequence[Step], attempts: Counter[str], total_s: float) -> None:
    """Prints the figures."""
    requests = f"{len(load.of('image'))} images, {len(load.of('text'))} texts"
    figures.report(TEST, "requests", requests)
    figures.report(TEST, "requests lost", sum(load.errors.values()), "", "= 0")
    figures.report(TEST, "sent again by the SDK", attempts["ModelInfer"] + attempts["Generate"])
    figures.report(TEST, "answers that went on", attempts["answers that went on"], "", "> 0")
    longest = pauses(load, steps)
    for step in steps:
        took_s = step.ended_s - step.began_s
        figures.report(TEST, f"{step.name} replaced in", took_s, "s", f"< {LONGEST_STEP_S:g}")
        pause = f"longest pause of a stream while {step.name} is replaced"
        figures.report(TEST, pause, longest[step.name], "s", f"< {LONGEST_PAUSE_S:g}")
    figures.report(TEST, "all processes replaced in", total_s, "s")
