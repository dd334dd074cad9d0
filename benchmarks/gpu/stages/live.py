"""Stages with a whole cluster: real processes, two agents on one GPU (on a CPU in a dry run).

Answers are greedy, and every cluster gets the same prompts: the same answers must come again, even
while sessions are moved, or agents killed or drained. bfloat16 may decide a close choice
differently after a prompt was computed anew. On a GPU the share of equal answers is therefore only
noted, and only lost answers are a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

import catenary
from benchmarks.gpu.models.models import Wanted, make
from benchmarks.gpu.stage import Context
from catenary_lab.live.packing.figures import Answer
from catenary_lab.live.packing.load import Mover, answer_of
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

_START_S = 100.0
_PART_S = 60.0
_TINY_FACTOR = 10
"""Factor of time limits in a dry run, which may share its CPU with other work."""
_AGENTS = 2
_MOVES = 2
_ROUNDS = 8
"""Rounds of answers after which nobody waits for moves any more."""
_CONFIG: dict[str, dict[str, Any]] = {
    "agent": {"decoder": "torch", "threads": 1},
    "scheduler": {"packing": "off"},
}


@dataclass(slots=True)
class World:
    """A running cluster with its client, and the size of its requests."""

    here: Context
    cluster: LocalCluster
    facts: dict[str, Any]
    client: catenary.AsyncClient
    model: str
    tokens: int
    sessions: int

    async def answers(self) -> list[Answer]:
        """Returns greedy answers to the same prompts, all requested at once."""
        # Every third prompt is a long one, for which tiny models have no room.
        numbers = [number for number in range(3 * self.sessions) if number % 3][: self.sessions]
        asked = (answer_of(self.client, self.model, each, self.tokens) for each in numbers)
        return list(await asyncio.gather(*asked))

    def compare(self, what: str, answers: list[Answer], expected: list[Answer]) -> None:
        """Notes how many answers broke off, and how many are as expected."""
        problems = [each.problem for each in answers if each.problem]
        self.here.row(
            f"{what}: answers lost", len(problems), at_most=0, note="; ".join(problems)[:200]
        )
        # Other clusters are asked for fewer tokens than the first one was.
        pairs = zip(answers, expected, strict=True)
        equal = sum(bool(a.tokens) and a.tokens == b.tokens[: len(a.tokens)] for a, b in pairs)
        self.here.row(
            f"{what}: answers equal",
            equal / len(expected),
            "",
            at_least=None if self.here.is_cuda else 1.0,
        )


@asynccontextmanager
async def world(
    here: Context,
    name: str,
    chains: Callable[[int], list[dict[str, Any]]],
    tokens: int,
    devices: tuple[str, ...] = (),
) -> AsyncIterator[World]:
    """Runs a cluster with the chains that a function returns for a number of blocks.

    Args:
        here: The stage.
        name: Name of the cluster's folder.
        chains: Chains of the plan, for a number of blocks.
        tokens: Tokens of an answer.
        devices: Devices of the agents, if they differ; else both are virtual GPUs of one device.
    """
    like = "tiny" if here.tiny else "llama-3.2-1b"
    repository, key = make(here, Wanted(like, 256 if here.tiny else 1024))
    folder = here.folder / name
    folder.mkdir()
    (folder / "models").symlink_to(repository.root)
    factor = _TINY_FACTOR if here.tiny else 1
    plan = folder / "plan.json"
    blocks = repository.block_table(key).blocks
    plan.write_text(json.dumps({"models": [{"name": key.name, "chains": chains(blocks)}]}))
    cluster = LocalCluster(
        ClusterOptions(
            agents=_AGENTS,
            models=(key.name,),
            plan_file=plan,
            grpc_port=0,
            http_port=0,
            device=str(here.device),
            virtual_gpus=1 if devices else _AGENTS,
            each_agent=tuple(
                {"metrics_port": free_port()}
                | (_own_settings(here, devices[at]) if devices else {})
                for at in range(_AGENTS)
            ),
            data_dir=folder,
            ready_timeout_s=_START_S * factor,
            extra=_CONFIG,
        )
    )
    began = time.perf_counter()
    try:
        facts = await cluster.start()
        here.row(f"{name}: ready", time.perf_counter() - began, "s")
        async with catenary.AsyncClient(
            str(facts["grpc"]), admin_target=str(facts["admin"]), timeout_s=_PART_S * factor
        ) as client:
            sessions = 2 if here.tiny else 16
            yield World(here, cluster, facts, client, key.name, tokens, sessions)
    except BaseException:
        for file in sorted((folder / "logs").glob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-15:]
            print(f"== {file.name}", *lines, sep="\n", flush=True)
        raise
    finally:
        await cluster.stop()


def _own_settings(here: Context, device: str) -> dict[str, Any]:
    """Returns the settings of an agent that has its device to itself."""
    cores = os.cpu_count() or 1
    return {"device": device, "threads": 1 if here.tiny else max(1, cores // 2)}


def _whole_chains(blocks: int) -> list[dict[str, Any]]:
    return [
        {"capacity": 32, "hops": [{"agent": f"agent-{at}", "blocks": [0, blocks]}]}
        for at in range(_AGENTS)
    ]


def whole(here: Context) -> None:
    """Streams, moves, kills and drains, on two agents that each hold the whole model."""
    asyncio.run(_whole(here))


async def _whole(here: Context) -> None:
    async with world(here, "whole", _whole_chains, 120 if here.tiny else 192) as there:
        began = time.perf_counter()
        expected = await there.answers()
        seconds = time.perf_counter() - began
        there.compare("first", expected, expected)
        count = sum(len(each.tokens) for each in expected)
        here.row("streams of the SDK", count / seconds, "tok/s", note=f"{there.sessions} at once")
        (here.folder / "expected.json").write_text(json.dumps([each.tokens for each in expected]))
        # The failure of one part must not cost the others.
        for name, part in (
            ("again", _again),
            ("OpenAI", _openai),
            ("moves", _moves),
            ("kill -9", _kill),
            ("drain", _drain),
        ):
            try:
                async with asyncio.timeout(_PART_S * (_TINY_FACTOR if here.tiny else 1)):
                    await part(there, expected)
            except Exception as error:
                here.row(
                    f"{name}: failed", 1, at_most=0, note=f"{type(error).__name__}: {error}"[:160]
                )


async def _again(there: World, expected: list[Answer]) -> None:
    there.compare("again", await there.answers(), expected)


async def _openai(there: World, _expected: list[Answer]) -> None:
    """Streams chat answers over HTTP, as OpenAI's clients do, and times their tokens."""
    url = f"{there.facts['http']}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        found = await asyncio.gather(
            *(_stream(session, url, there, number) for number in range(there.sessions))
        )
    seconds = time.perf_counter() - began
    first = statistics.median(moments[0] - began for moments in found)
    tokens = sum(len(moments) for moments in found)
    there.here.row("OpenAI: answers without a token", sum(not each for each in found), at_most=0)
    there.here.row("OpenAI: first token, median", first * 1e3, "ms")
    there.here.row("OpenAI: events", tokens / seconds, "1/s")


async def _stream(
    session: aiohttp.ClientSession, url: str, there: World, number: int
) -> list[float]:
    """Returns the times at which events of one stream arrived."""
    body = {
        "model": there.model,
        "stream": True,
        "max_tokens": there.tokens,
        "temperature": 0.7,
        "seed": number,
        "messages": [{"role": "user", "content": f"Say {number}."}],
    }
    moments = []
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
    return moments


async def _moves(there: World, expected: list[Answer]) -> None:
    """Moves sessions by their caches and by their tokens while they generate."""
    mover = Mover(there.client, there.model, _MOVES, seed=1)
    answers: list[Answer] = []
    rounds = 0
    while not mover.is_done and rounds < _ROUNDS:
        moving = asyncio.create_task(mover.run(lambda: None))
        answers += await there.answers()
        rounds += 1
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
    there.compare("moves", answers, expected * rounds)
    for mode in ("kv", "tokens"):
        done = [each for each in mover.moved if each.outcome == "moved" and each.mode == mode]
        times = [each.duration_ms for each in done]
        # Tiny answers may be over before a move is.
        there.here.row(
            f"moves by {mode}",
            len(done),
            at_least=1 if there.here.is_cuda else None,
            note=f"{statistics.median(times):.1f} ms" if times else "",
        )

    await _ways(there)


async def _ways(there: World) -> None:
    """Notes how many bytes of caches took which way between the agents."""
    ways: dict[str, float] = {}
    failed = 0.0
    async with aiohttp.ClientSession() as session:
        for agent in there.cluster.options.each_agent:
            page = f"http://127.0.0.1:{agent['metrics_port']}/metrics"
            async with session.get(page) as response:
                families = list(text_string_to_metric_families(await response.text()))
            for sample in (each for family in families for each in family.samples):
                if sample.name == "catenary_cache_bytes_total":
                    way = sample.labels["way"]
                    ways[way] = ways.get(way, 0.0) + sample.value
                if sample.name == "catenary_cache_loans_failed_total":
                    failed += sample.value
    for way, nbytes in sorted(ways.items()):
        there.here.row(f"moves by kv: caches by way of {way}", nbytes / 1e6, "MB")
    there.here.row("moves by kv: loans that failed", failed)


async def _kill(there: World, expected: list[Answer]) -> None:
    """Kills an agent while it generates; its sessions go on at the other one."""
    running = asyncio.create_task(there.answers())
    await asyncio.sleep(0.05)
    pid = there.cluster.facts()["pids"]["agent-1"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    there.compare("kill -9", await running, expected)
    began = time.perf_counter()
    await _until(lambda: _serves(there, "agent-1", pid))
    there.here.row("kill -9: the agent is back after", time.perf_counter() - began, "s")


async def _drain(there: World, expected: list[Answer]) -> None:
    """Drains an agent while it generates."""
    running = asyncio.create_task(there.answers())
    await asyncio.sleep(0.05)
    await there.client.drain("agent-1")
    there.compare("drain", await running, expected)


async def _serves(there: World, agent_id: str, former: int) -> bool:
    """Returns True if an agent is ready, in another process than before."""
    if there.cluster.facts()["pids"][agent_id] in {None, former}:
        return False
    with contextlib.suppress(catenary.CatenaryError):
        status = await there.client.status()
        return any(
            each.agent_id == agent_id and each.state == "ready" and each.partitions
            for each in status.agents
        )
    return False


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - another process has to become ready
        await asyncio.sleep(0.1)


def ring(here: Context) -> None:
    """Runs a ring of a CPU with the first blocks and the GPU with the others."""

    def chains(blocks: int) -> list[dict[str, Any]]:
        cut = max(1, blocks // 4)
        hops = [
            {"agent": "agent-0", "blocks": [0, cut]},
            {"agent": "agent-1", "blocks": [cut, blocks]},
        ]
        return [{"capacity": 32, "hops": hops}]

    devices = ("cpu", str(here.device))
    asyncio.run(_compared(here, "ring", chains, devices))


def split(here: Context) -> None:
    """Runs prompts on one agent and answers on the other."""

    def chains(blocks: int) -> list[dict[str, Any]]:
        return [
            {"capacity": 32, "role": role, "hops": [{"agent": agent, "blocks": [0, blocks]}]}
            for role, agent in (("prefill", "agent-0"), ("decode", "agent-1"))
        ]

    asyncio.run(_compared(here, "split", chains, ()))


async def _compared(
    here: Context,
    name: str,
    chains: Callable[[int], list[dict[str, Any]]],
    devices: tuple[str, ...],
) -> None:
    """Asks another cluster the same, and compares its answers with those of the first."""
    async with world(here, name, chains, 12 if here.tiny else 96, devices) as there:
        began = time.perf_counter()
        answers = await there.answers()
        seconds = time.perf_counter() - began
        count = sum(len(each.tokens) for each in answers)
        here.row(f"{name}: streams", count / seconds, "tok/s", note=f"{there.sessions} at once")
        file = here.folder / "expected.json"
        said = json.loads(file.read_text()) if file.exists() else [a.tokens for a in answers]
        there.compare(name, answers, [Answer(0, tuple(each)) for each in said])
