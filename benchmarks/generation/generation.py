"""Cost of a token through the public API, compared with other engines in the same run.

Clusters (gateway, scheduler, agents as real processes) and rivals take turns for a few rounds each,
so that a disturbance affects all of them. Every engine has the same number of threads (one per
agent), decodes greedily and generates the same number of tokens. The best round of each counts.
Figures are ratios, except for the cost of a hop and the distance from the floor.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
import urllib.request
from collections.abc import AsyncIterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio

from benchmarks.generation.rivals import Rival
from catenary_lab.limits import Figure, at_least, at_most
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

THREADS = 1
PROMPT = list(range(1000, 1032))
"""A prompt of arbitrary tokens, since the cost of a step does not depend on them."""
SESSIONS = 8
DATA = Path(".catenary/bench-generation")
FP32, INT4 = "smollm2-135m", "smollm2-135m-int4"


@dataclass
class Stream:
    """Times of the tokens of one session, in seconds since its request."""

    seconds: list[float] = field(default_factory=list)
    hops_ns: list[int] = field(default_factory=list)
    """Times from the end of compute on an agent to its beginning on the next, if timed."""

    @property
    def per_token_s(self) -> float:
        """Mean seconds between two tokens."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


class Cluster:
    """A local cluster that serves one model over `agents` agents."""

    def __init__(
        self,
        name: str,
        model: str,
        agents: int,
        *,
        guesses: bool = False,
        keeps_prefixes: bool = False,
    ) -> None:
        """Describes a cluster.

        Args:
            name: The name of its folder.
            model: The model.
            agents: Number of agents.
            guesses: Whether agents guess tokens, as they do by default. The cost of a token shows
                without only, for prompts of arbitrary tokens make answers repeat themselves.
            keeps_prefixes: Whether agents keep the caches of beginnings, as they do by default. The
                cost of a prompt shows without only, where it is asked again and again.
        """
        options: dict[str, object] = {"threads": THREADS}
        if not guesses:
            options["draft_tokens"] = 0
        if not keeps_prefixes:
            options["prefix_cache"] = "off"
        self.model = model
        self.agents = agents
        data_dir = data_dir_of(name)
        key = ModelRepository(DATA / "models").resolve(model)
        plan = data_dir / "plan.json"
        plan.write_text(json.dumps(ring_placement(key, agents, SESSIONS + 1)))
        self._cluster = LocalCluster(
            ClusterOptions(
                agents=agents,
                models=(model,),
                plan_file=plan,
                grpc_port=0,
                http_port=0,
                data_dir=data_dir,
                extra={"agent": options},
            )
        )
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Starts the cluster, and returns when it serves."""
        facts = await self._cluster.start()
        self._channel = grpc.aio.insecure_channel(str(facts["grpc"]))

    async def stop(self) -> None:
        """Ends every process."""
        if self._channel is not None:
            await self._channel.close()
        await self._cluster.stop()

    def generate(
        self,
        prompt: list[int],
        sampling: generation_pb2.SamplingParameters,
        *,
        timed: bool = False,
    ) -> AsyncIterable[generation_pb2.GenerateResponse]:
        """Returns the responses to one request."""
        assert self._channel is not None
        request = generation_pb2.GenerateRequest(
            model=self.model, token_ids=prompt, sampling=sampling, timings=timed
        )
        responses: AsyncIterable[generation_pb2.GenerateResponse] = (
            generation_pb2_grpc.GenerationStub(self._channel).Generate(request, timeout=300)
        )
        return responses

    async def stream(self, tokens: int, *, timed: bool = False, grammar: str = "") -> Stream:
        """Generates `tokens` tokens in one session, which `grammar` must not end before."""
        sampling = generation_pb2.SamplingParameters(
            max_tokens=tokens, ignore_eos=True, grammar=grammar
        )
        seen, started = Stream(), time.perf_counter()
        async for response in self.generate(PROMPT, sampling, timed=timed):
            now = time.perf_counter() - started
            seen.seconds += [now] * len(response.token_ids)
            for timing in response.timings:
                for hop, following in pairwise(timing.hops):
                    gap = hop.send_ns + following.transfer_ns + following.wait_ns
                    seen.hops_ns.append(gap)
        if len(seen.seconds) != tokens:
            raise RuntimeError(f"{len(seen.seconds)} tokens instead of {tokens}")
        return seen

    async def together(self, sessions: int, tokens: int, grammar: str = "") -> float:
        """Returns the tokens per second of concurrent sessions, once all of them decode."""
        asked = (self.stream(tokens, grammar=grammar) for _ in range(sessions))
        streams = await asyncio.gather(*asked)
        begin = max(each.seconds[0] for each in streams)
        end = min(each.seconds[-1] for each in streams)
        count = sum(begin < moment <= end for each in streams for moment in each.seconds)
        return count / (end - begin)


def data_dir_of(name: str) -> Path:
    """Returns the folder of a cluster, which has the models that all clusters share."""
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "models").exists():
        (folder / "models").symlink_to((DATA / "models").resolve())
    return folder


def prompt_of(tokens: int, number: int) -> list[int]:
    """Returns prompt `number` of arbitrary tokens, with a beginning of its own."""
    return [1000 + (number * 7919 + at * 31) % 20_000 for at in range(tokens)]


def metric(port: int, pattern: str) -> float:
    """Returns the sum of the values whose lines on a process's metrics page match a pattern."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))


def ring_placement(key: ModelKey, agents: int, sessions: int) -> dict[str, object]:
    """Returns a plan document of one chain, with nearly equal numbers of blocks."""
    blocks = ModelRepository(DATA / "models").block_table(key).blocks
    cuts = [round(blocks * index / agents) for index in range(agents + 1)]
    hops = [
        {"agent": f"agent-{index}", "blocks": [cuts[index], cuts[index + 1]]}
        for index in range(agents)
    ]
    return {"models": [{"name": key.name, "chains": [{"capacity": sessions, "hops": hops}]}]}


@contextmanager
def rivals_of(model: str) -> Iterator[dict[str, Rival]]:
    """Runs the other engines on the same weights."""
    folder = ModelRepository(DATA / "models").folder(
        ModelRepository(DATA / "models").resolve(model)
    )
    running = {
        "transformers": Rival("transformers", folder, THREADS),
        "genai": Rival("genai", folder / "onnx-fp32", THREADS),
        "ct2-float32": Rival("ct2-float32", folder, THREADS),
        "memory": Rival("memory", folder, THREADS),
    }
    try:
        yield running
    finally:
        for rival in running.values():
            rival.close()


async def first_token_while_others_decode(
    cluster: Cluster, tokens: int
) -> tuple[float, float, float]:
    """Returns seconds: first token of a ninth session, of a lone one, and the others' step."""
    alone = min([(await cluster.stream(2)).seconds[0] for _ in range(3)])
    others = [asyncio.create_task(cluster.stream(tokens)) for _ in range(SESSIONS)]
    await cluster.stream(4)  # joins while they begin; when it is done they decode
    newcomers = [(await cluster.stream(4)).seconds[0] for _ in range(3)]
    streams = await asyncio.gather(*others)
    step = statistics.median(each.per_token_s for each in streams)
    return statistics.median(newcomers), alone, step


async def measure(quick: bool) -> list[Figure]:
    """Lets clusters and rivals take turns, and returns the figures."""
    rounds, tokens = (2, 24) if quick else (5, 64)
    for model in (FP32, INT4):
        ensure_model(DATA / "models", model)
    table = ModelRepository(DATA / "models").decoder_table(
        ModelRepository(DATA / "models").resolve(FP32)
    )
    weights = table.blocks * table.block_bytes + table.head_bytes
    best: dict[str, float] = {}
    rates: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    async with AsyncExitStack() as stack:
        clusters = {
            "one": Cluster("one", FP32, 1),
            "three": Cluster("three", FP32, 3),
            "int4": Cluster("int4", INT4, 1),
        }
        for cluster in clusters.values():
            await cluster.start()
            stack.push_async_callback(cluster.stop)
        rivals = stack.enter_context(rivals_of(FP32))
        for name, cluster in clusters.items():
            await cluster.stream(8)
            await cluster.together(SESSIONS, 4)
            rates[name] = 0.0
        for _ in range(rounds):
            for name, rival in rivals.items():
                moments = await asyncio.to_thread(rival.generate, PROMPT, tokens)
                if name == "memory":
                    note(name, moments[0])
                else:
                    note(name, (moments[-1] - moments[0]) / (len(moments) - 1))
            for name, cluster in clusters.items():
                note(name, (await cluster.stream(tokens)).per_token_s)
            for name in ("one", "three"):
                rate = await clusters[name].together(SESSIONS, tokens)
                rates[name] = max(rates[name], rate)
        hop = statistics.median((await clusters["three"].stream(tokens, timed=True)).hops_ns) / 1e9
        newcomer = await first_token_while_others_decode(clusters["one"], 3 * tokens)
    return figures(best, rates, weights, hop, newcomer)


def figures(
    best: dict[str, float],
    rates: dict[str, float],
    weights: int,
    hop_s: float,
    newcomer: tuple[float, float, float],
) -> list[Figure]:
    """Returns the measurements with their limits."""
    one, three = best["one"], best["three"]
    waiting, alone, step = newcomer
    floor = best["memory"] * weights / (512 << 20)
    return [
        at_most("fp32, one agent, one session: time per token", one * 1e3, "ms"),
        at_least("transformers.generate / one agent", best["transformers"] / one, "x", 2.5),
        at_least("onnxruntime-genai / one agent", best["genai"] / one, "x", 0.9),
        at_least("CTranslate2 float32 / one agent", best["ct2-float32"] / one, "x", 1.0),
        at_most("one agent / floor of memory bandwidth", one / floor, "x", 1.25),
        at_least("one agent / three agents on the same cores", one / three, "x", 0.85),
        at_least("eight sessions / one session, one agent", rates["one"] * one, "x", 4.5),
        at_least("eight sessions / one session, three agents", rates["three"] * three, "x", 1.0),
        at_least("int4 / fp32, one session", one / best["int4"], "x", 2.5),
        at_most("a hop, from compute to compute, per token", hop_s * 1e3, "ms", 1.0),
        at_most("first token of a ninth session", waiting * 1e3, "ms"),
        at_most("  beyond that of a lone session", (waiting - alone) / step, "steps", 2.5),
    ]


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
