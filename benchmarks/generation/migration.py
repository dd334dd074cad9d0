"""The effect of a live migration on a client: the gap between two tokens around the hand-over.

Two agents run in one process with the real model and the real transport. One session moves to and
fro between them, and one more stays on each agent. A gap is counted in steps: the median gap of the
same stream while nothing moves. The agents share the cores of this machine, so a step is slower
here than on agents of their own; a figure in steps is comparable.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.generation.generation import DATA, FP32, prompt_of
from benchmarks.transport import peer_of
from catenary_agent.decoders.base import CacheLayout, DecoderCost
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.engine.engine import BatchEngine
from catenary_agent.executors.device import Device
from catenary_agent.generation.context import GenerationContext, GenerationLimits
from catenary_agent.generation.loop.engine import GenerationEngine
from catenary_agent.generation.loop.table import LoadedDecoder
from catenary_agent.generation.meter import GenerationMeter
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_lab.limits import Figure, at_most
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, generation_pb2
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import ReceivedFrame
from catenary_services.transport.settings import TransportSettings
from catenaryd.demo.models import ensure_model

AGENTS = ("agent-0", "agent-1")
GATEWAY = "gateway-0"
SESSION_TOKENS = 2048
SETTLING_TOKENS = 6
"""Tokens between two moves, after which the last move no longer affects the stream."""
_COST = DecoderCost(0, 1000, 1000, 100)
_BUDGET_NS = 3_600_000_000_000


@dataclass
class Stream:
    """The tokens of one answer: the session of each, with its time in seconds."""

    said: list[tuple[int, float]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Gateway:
    """Opens sessions, moves them, and notes when their tokens arrive."""

    def __init__(self, hub: TransportHub, key: ModelKey, blocks: int) -> None:
        self._hub = hub
        self._key = key
        self._blocks = blocks
        self._streams: dict[int, Stream] = {}
        self._changed = asyncio.Event()

    def on_frame(self, frame: ReceivedFrame) -> None:
        """Takes the tokens of a frame."""
        header = frame_pb2.FrameHeader.FromString(frame.header)
        frame.release()
        now = time.perf_counter()
        for token in header.session_tokens:
            stream = self._streams[token.session_id]
            stream.said.append((token.session_id, now))
            stream.token_ids.append(token.token_id)
        self._changed.set()

    async def open(self, session_id: int, agent: str, prompt: list[int]) -> Stream:
        """Begins an answer."""
        stream = self._streams[session_id] = Stream()
        entry = frame_pb2.SessionRows(session_id=session_id, opening=self._opening(agent, prompt))
        kind = frame_pb2.FRAME_KIND_SESSION_STEP
        await self._send(agent, frame_pb2.FrameHeader(kind=kind, epoch=1, session_rows=[entry]))
        return stream

    async def move(
        self, moved: int, session_id: int, agents: tuple[str, str], prompt: list[int], by: str
    ) -> None:
        """Orders the move of a session from the first to the second of two agents."""
        stream = self._streams[session_id] = self._streams[moved]
        opening = self._opening(agents[1], prompt)
        opening.token_ids.extend(stream.token_ids)
        move = frame_pb2.SessionMove(
            session_id=session_id,
            moved_session_id=moved,
            step=frame_pb2.SessionMove.STEP_BEGIN,
            by_tokens=by == "tokens",
            opening=opening,
        )
        kind = frame_pb2.FRAME_KIND_SESSION_MOVE
        await self._send(agents[0], frame_pb2.FrameHeader(kind=kind, epoch=1, move=move))

    async def wait(self, stream: Stream, session_id: int, tokens: int) -> None:
        """Returns once a session of a stream has generated `tokens` tokens."""
        async with asyncio.timeout(600):
            while sum(said == session_id for said, _ in stream.said) < tokens:
                self._changed.clear()
                await self._changed.wait()

    def _opening(self, agent: str, prompt: list[int]) -> frame_pb2.SessionOpening:
        hop = common_pb2.Hop(
            agent_id=agent,
            model=self._key.name,
            model_version=self._key.version,
            first_block=0,
            last_block=self._blocks,
        )
        return frame_pb2.SessionOpening(
            gateway_id=GATEWAY,
            request_id=1,
            route=[hop],
            token_ids=prompt,
            prompt_tokens=len(prompt),
            sampling=generation_pb2.SamplingParameters(ignore_eos=True),
            budget_ns=_BUDGET_NS,
        )

    async def _send(self, to: str, header: frame_pb2.FrameHeader) -> None:
        link = await self._hub.link_to(to, 5.0)
        slot = await link.export(0, 5.0)
        await link.push(slot, header.SerializeToString(), 5.0)


@asynccontextmanager
async def agent(hub: TransportHub, name: str, key: ModelKey) -> AsyncIterator[GenerationEngine]:
    """Runs an agent with the whole model."""
    repository = ModelRepository(DATA / "models")
    blocks = repository.block_table(key).blocks
    layout = CacheLayout(4 * blocks, SESSION_TOKENS, (0,))
    decoder = load_decoder(repository, PartitionKey(key, 0, blocks), Device("cpu"), layout)
    engine = BatchEngine(name, hub, lambda message: None)
    around = GenerationContext(hub, lambda message: None, engine.held, GenerationMeter())
    generation = GenerationEngine(name, around, GenerationLimits())
    generation.start()
    engine.start()
    engine.hand_frames_to(generation.on_frame, generation.frame_kinds)
    await hub.start(engine.on_frame)
    generation.add_decoder(LoadedDecoder(PartitionBatcher(decoder, _COST), layout, _COST))
    try:
        yield generation
    finally:
        await generation.close()
        await engine.close()


async def measure(quick: bool) -> list[Figure]:
    """Moves sessions of several lengths to and fro, and returns the figures."""
    key = ensure_model(DATA / "models", FP32)
    blocks = ModelRepository(DATA / "models").block_table(key).blocks
    lengths, moves = ((200,), 4) if quick else ((200, 500, 1000), 12)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cat-"))
        settings = TransportSettings(enabled=("shm", "tcp"), runtime_dir=Path(folder))
        hubs = {name: TransportHub(name, settings) for name in (*AGENTS, GATEWAY)}
        for hub in hubs.values():
            stack.push_async_callback(hub.close)
        gateway = Gateway(hubs[GATEWAY], key, blocks)
        await hubs[GATEWAY].start(gateway.on_frame)
        agents = [await stack.enter_async_context(agent(hubs[n], n, key)) for n in AGENTS]
        peers = [peer_of(name, hub) for name, hub in hubs.items()]
        for hub in hubs.values():
            hub.update_directory(peers)
        others = [
            await gateway.open(1 + n, name, prompt_of(32, n)) for n, name in enumerate(AGENTS)
        ]
        figures = []
        for number, length in enumerate(lengths):
            first = 1000 * (number + 1)
            figures += await one_length(gateway, agents, others, first, length, moves)
    return figures


async def one_length(
    gateway: Gateway,
    agents: list[GenerationEngine],
    others: list[Stream],
    first: int,
    length: int,
    moves: int,
) -> list[Figure]:
    """Moves one session by either mode in turn, and returns the figures of its stream."""
    prompt, session = prompt_of(length, first), first
    stream = await gateway.open(session, AGENTS[0], prompt)
    await gateway.wait(stream, session, 2 * SETTLING_TOKENS)
    before = [len(other.said) for other in others]
    modes = {}
    for number in range(2 * moves):
        by = ("kv", "kv", "tokens", "tokens")[number % 4]
        way = AGENTS if number % 2 == 0 else AGENTS[::-1]
        modes[session + 1] = by
        await gateway.move(session, session + 1, way, prompt, by)
        session += 1
        await gateway.wait(stream, session, SETTLING_TOKENS)
    for engine in agents:
        engine.close_sessions([session])
    gaps: dict[str, list[float]] = {"kv": [], "tokens": [], "none": []}
    for (old, earlier), (new, later) in pairwise(stream.said[1:]):
        gaps[modes[new] if old != new else "none"].append(later - earlier)
    step = statistics.median(gaps["none"])
    beside = [
        later - earlier
        for other, start in zip(others, before, strict=True)
        for (_, earlier), (_, later) in pairwise(other.said[start:])
    ]
    figures = [at_most(f"a step, {length} tokens", 1e3 * step, "ms")]
    for by, limit in (("kv", 3.0), ("tokens", None)):
        stalls = np.array(gaps[by]) / step
        name = f"stall by {by}, {length} tokens"
        p50, p99 = (float(np.percentile(stalls, share)) for share in (50, 99))
        figures.append(at_most(f"{name}, p50", p50, "steps"))
        figures.append(at_most(f"{name}, p99 of {len(stalls)}", p99, "steps", limit))
    p99 = float(np.percentile(beside, 99))
    figures.append(at_most(f"gap of streams beside, {length} tokens, p99", p99 / step, "steps"))
    return figures


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))
