"""More sessions than memory holds at full length: chats of 100 to 300 tokens of at most 2048.

One agent with memory for the caches of four full sessions serves the same chats with one slot per
full session (factor 1) and with four (`cache_oversubscription` 4). Then it has memory for a single
full session and sixteen slots, which is too little for sixteen of these chats. Processes and model
are real, and all chats are requested at once. The memory of caches is read from the kernel: their
mappings are the only ones of an agent that are kept out of huge pages.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.generation.generation import DATA, FP32, THREADS, data_dir_of, metric, prompt_of
from catenary_agent.executors.device import Device
from catenary_agent.generation.state.partition_batcher import chunk_tokens_for
from catenary_lab.limits import Figure, at_least, at_most
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.domain.decoder import DecoderRuntime, LargestStep
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

CASES = ((4, 1.0), (4, 4.0), (1, 16.0))
"""The number of full sessions there is memory for, and the number of slots for each of them."""
MEBIBYTE, GIBIBYTE = float(1 << 20), float(1 << 30)
_POLL_S = 0.25
_TIMEOUT_S = 900.0


def cache_memory_bytes(pid: int) -> int:
    """Returns the memory that key-value caches of an agent process have taken on a CPU."""
    found, resident = 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and " nh" in line:
            found += resident
    return found


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt, and the number of tokens in its answer."""

    prompt: tuple[int, ...]
    tokens: int


def chats(count: int) -> list[Chat]:
    """Returns chats of 100 to 300 tokens in all, the same every time."""
    rng = random.Random(6)
    found = []
    for number in range(count):
        whole = rng.randrange(100, 301)
        asked = rng.randrange(whole // 4, whole // 2)
        found.append(Chat(tuple(prompt_of(asked, number)), whole - asked))
    return found


@dataclass
class Served:
    """Measurements of one run."""

    wall_s: float = 0.0
    tokens: int = 0
    running_s: float = 0.0
    """Sum over sessions of the time from their first to their last token."""
    peak_bytes: int = 0
    budget_bytes: int = 0
    step_bytes: int = 0
    """Bytes that one step may take beyond the budget: a cache block of every session."""
    preempted: float = 0.0
    answers: list[list[int]] = field(default_factory=list)


async def serve(full_sessions: int, factor: float, asked: list[Chat], key: ModelKey) -> Served:
    """Serves chats, all requested at once, on a cluster of its own."""
    repository = ModelRepository(DATA / "models")
    table, manifest = repository.decoder_table(key), repository.manifest(key)
    data_dir = data_dir_of(f"growth-{full_sessions}-{factor:g}")
    port = free_port()
    held = table.held_by(DecoderRuntime.ONNX, manifest.precision)
    tokens = full_sessions * table.blocks * manifest.session_tokens
    budget_bytes = held.slot_bytes(tokens)
    # A plan also keeps free the memory of a step of the largest batch, with two entries.
    step = LargestStep(
        manifest.max_batch, chunk_tokens_for(Device.parse("cpu")), manifest.session_tokens, 2
    )
    cluster = LocalCluster(
        ClusterOptions(
            agents=1,
            models=(FP32,),
            grpc_port=0,
            http_port=0,
            data_dir=data_dir,
            extra={
                "agent": {
                    "threads": THREADS,
                    "memory_bytes": held.partition_bytes((0, table.blocks), tokens, step),
                },
                "scheduler": {"cache_oversubscription": factor, "metrics_port": port},
            },
        )
    )
    spec = await cluster.start()
    try:
        step_bytes = round(full_sessions * factor) * table.blocks * table.slot_bytes(16)
        served = Served(budget_bytes=budget_bytes, step_bytes=step_bytes)
        pids = spec["pids"]
        assert isinstance(pids, dict)
        watching = asyncio.create_task(_watch(int(pids["agent-0"]), served))
        await _ask_all(str(spec["grpc"]), asked, served)
        watching.cancel()
        await asyncio.sleep(1.5)  # the scheduler counts once a second
        served.preempted = await asyncio.to_thread(preempted_sessions, port)
    finally:
        await cluster.stop()
    return served


async def _watch(pid: int, served: Served) -> None:
    while True:
        served.peak_bytes = max(served.peak_bytes, await asyncio.to_thread(cache_memory_bytes, pid))
        await asyncio.sleep(_POLL_S)


async def _ask_all(target: str, asked: list[Chat], served: Served) -> None:
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def one(chat: Chat) -> list[int]:
            sampling = generation_pb2.SamplingParameters(max_tokens=chat.tokens, ignore_eos=True)
            request = generation_pb2.GenerateRequest(
                model=FP32, token_ids=chat.prompt, sampling=sampling
            )
            tokens: list[int] = []
            first = 0.0
            async for response in stub.Generate(request, timeout=_TIMEOUT_S):
                first = first or loop.time()
                tokens += response.token_ids
            served.running_s += loop.time() - first
            return tokens

        began = loop.time()
        served.answers = list(await asyncio.gather(*(one(chat) for chat in asked)))
        served.wall_s = loop.time() - began
        served.tokens = sum(len(answer) for answer in served.answers)


def preempted_sessions(port: int) -> float:
    """Returns how many sessions had to wait for memory, by a scheduler's metrics."""
    return metric(port, r'catenary_placements_total\{.*"preempted"')


async def measure(quick: bool) -> list[Figure]:
    """Runs the clusters one after the other, and returns the figures."""
    asked = chats(12 if quick else 32)
    key = ensure_model(DATA / "models", FP32)
    runs = {case: await serve(*case, asked, key) for case in CASES}
    one, most, _ = runs.values()
    if any(run.answers != one.answers for run in runs.values()):
        raise RuntimeError("answers differ")
    found = []
    for (full_sessions, factor), run in runs.items():
        at_a_time = run.running_s / run.wall_s
        gibibytes = run.budget_bytes / GIBIBYTE
        name = f"memory for {full_sessions}, factor {factor:g}"
        found += [
            at_most(f"{name}: sessions at a time, mean", at_a_time, "sessions"),
            at_most(f"{name}: the same per GiB of caches", at_a_time / gibibytes, "sessions"),
            at_most(f"{name}: throughput", run.tokens / run.wall_s, "tokens/s"),
            at_most(f"{name}: preempted", run.preempted, "sessions"),
            at_most(f"{name}: memory the caches may take", run.budget_bytes / MEBIBYTE, "MiB"),
            at_most(
                f"{name}: most they took",
                run.peak_bytes / MEBIBYTE,
                "MiB",
                (run.budget_bytes + run.step_bytes) / MEBIBYTE,
            ),
        ]
    gain = (most.running_s / most.wall_s) / (one.running_s / one.wall_s)
    found.append(at_least("sessions at a time, factor 4 over factor 1", gain, "x", 2.0))
    return found


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
