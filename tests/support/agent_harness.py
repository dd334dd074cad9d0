"""Peers, frames and executors for tests of the agent: real transports, scripted computations."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from catenary_agent.engine.engine import BatchEngine, EngineLimits
from catenary_agent.engine.partitions import LoadedPartition
from catenary_agent.engine.reporting import OutgoingMessage
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.tensors import ANY, DATATYPE_OF, TensorSpec
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.telemetry.tracing import Tracer
from catenary_services.transport.frames import layout, tensor_views
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSettings
from shared_helpers.peers import peer_of

MODEL = ModelKey("toy", "1")
SECOND_NS = 1_000_000_000


@dataclass
class Received:
    """A frame as the test sees it: copied, and its memory given back."""

    header: frame_pb2.FrameHeader
    tensors: dict[str, np.ndarray]


class TestPeer:
    """A process that frames can be sent to and from, e.g. a gateway."""

    __test__ = False

    def __init__(self, peer_id: str, hub: TransportHub) -> None:
        self.peer_id = peer_id
        self.hub = hub
        self.frames: asyncio.Queue[Received] = asyncio.Queue()

    def on_frame(self, frame) -> None:
        header = frame_pb2.FrameHeader.FromString(frame.header)
        views = tensor_views(header.tensors, frame.payload)
        tensors = {name: array.copy() for name, array in views.items()}
        del views
        frame.release()
        self.frames.put_nowait(Received(header, tensors))

    async def next(self, timeout_s: float = 30.0) -> Received:
        async with asyncio.timeout(timeout_s):
            return await self.frames.get()

    async def send(self, to: str, header: frame_pb2.FrameHeader, **tensors: np.ndarray) -> None:
        """Sends tensors laid out as they are; the header's own tensor list wins if it is set."""
        headers, nbytes = layout([(n, DATATYPE_OF[a.dtype], a.shape) for n, a in tensors.items()])
        link = await self.hub.link_to(to, 5.0)
        slot = await link.export(nbytes, 5.0)
        views = tensor_views(headers, slot.view)
        for name, array in tensors.items():
            views[name][...] = array
        del views
        if not header.tensors:
            header.tensors.extend(headers)
        header.sent_monotonic_ns = time.monotonic_ns()
        await link.push(slot, header.SerializeToString(), 5.0)


def hub_settings(folder: Path, *transports: str) -> TransportSettings:
    return TransportSettings(enabled=transports or ("shm", "tcp"), runtime_dir=folder)


class ScriptedExecutor:
    """Doubles `x`. Can be held up, made to take time or made to fail."""

    def __init__(self, key: PartitionKey, *, width: int = 4, batched: bool = True) -> None:
        self.key = key
        self.memory_bytes = 1000
        self.batched = batched
        name_in, name_out = f"t{key.first_block}", f"t{key.last_block}"
        first = ANY if batched else 1
        self.inputs = (TensorSpec(name_in, "FP32", (first, width)),)
        self.outputs = (TensorSpec(name_out, "FP32", (first, width)),)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.takes_s = 0.0
        self.fails: Exception | None = None
        self.shapes_known = True
        self.ran: list[np.ndarray] = []
        self.wrote_in_place: list[bool] = []
        self.closed = False

    def output_shapes(self, input_shapes: Sequence[tuple[int, ...]]):
        return [tuple(input_shapes[0])] if self.shapes_known else None

    def run(self, inputs, outputs=None):
        assert not self.closed
        self.entered.set()
        assert self.gate.wait(20)
        if self.takes_s:
            time.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        self.ran.append(inputs[0].copy())
        self.wrote_in_place.append(outputs is not None)
        if outputs is None:
            return [inputs[0] * 2]
        np.multiply(inputs[0], 2, out=outputs[0])
        return list(outputs)

    def close(self) -> None:
        self.closed = True


class Told:
    """What an engine told the scheduler."""

    def __init__(self) -> None:
        self.messages: list[scheduler_pb2.AgentMessage] = []
        self._changed = asyncio.Event()

    def __call__(self, message: OutgoingMessage) -> None:
        self.messages.append(message.message())
        self._changed.set()

    def of(self, kind: str) -> list:
        return [getattr(m, kind) for m in self.messages if m.WhichOneof("kind") == kind]

    async def wait_for(self, kind: str, count: int = 1, timeout_s: float = 30.0) -> list:
        async with asyncio.timeout(timeout_s):
            while len(self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)


@dataclass
class Node:
    """An engine behind a real transport hub."""

    engine: BatchEngine
    hub: TransportHub
    told: Told
    executors: dict[tuple[int, int], ScriptedExecutor] = field(default_factory=dict)

    def host(self, first: int, last: int, *, max_batch: int = 16, **options) -> ScriptedExecutor:
        executor = ScriptedExecutor(PartitionKey(MODEL, first, last), **options)
        self.executors[first, last] = executor
        self.engine.partitions.add(LoadedPartition(executor, False, max_batch))
        return executor


class Net:
    """Peers that know each other."""

    def __init__(self, folder: Path, *transports: str) -> None:
        self._folder = folder
        self._transports = transports
        self._hubs: dict[str, TransportHub] = {}
        self._engines: list[BatchEngine] = []

    def _hub(self, peer_id: str) -> TransportHub:
        settings = hub_settings(self._folder, *self._transports)
        self._hubs[peer_id] = TransportHub(peer_id, settings)
        return self._hubs[peer_id]

    def introduce(self) -> None:
        directory = [peer_of(peer_id, hub) for peer_id, hub in self._hubs.items()]
        for hub in self._hubs.values():
            hub.update_directory(directory)

    async def gateway(self, peer_id: str = "gw-0") -> TestPeer:
        peer = TestPeer(peer_id, self._hub(peer_id))
        await peer.hub.start(peer.on_frame)
        self.introduce()
        return peer

    async def agent(
        self,
        agent_id: str = "a-0",
        limits: EngineLimits | None = None,
        tracer: Tracer | None = None,
    ) -> Node:
        hub, told = self._hub(agent_id), Told()
        engine = BatchEngine(agent_id, hub, told, limits, tracer)
        engine.start()
        await hub.start(engine.on_frame)
        self._engines.append(engine)
        self.introduce()
        return Node(engine, hub, told)

    async def remove(self, peer_id: str) -> None:
        await self._hubs.pop(peer_id).close()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        for hub in self._hubs.values():
            await hub.close()


@asynccontextmanager
async def open_net(folder: Path, *transports: str) -> AsyncIterator[Net]:
    net = Net(folder, *transports)
    try:
        yield net
    finally:
        await net.close()


def header(
    batch_id: int = 1,
    *,
    rows: int = 1,
    batch_rows: int | None = None,
    first_row: int = 0,
    agents: Sequence[str] = ("a-0",),
    blocks: Sequence[tuple[int, int]] | None = None,
    position: int = 0,
    epoch: int = 1,
    start_ns: int = 0,
    gateway: str = "gw-0",
    request: int = 7,
    budget_ns: int = 5 * SECOND_NS,
    traceparent: str = "",
) -> frame_pb2.FrameHeader:
    """Returns the header of a frame on its way to `agents[position]`."""
    blocks = blocks or [(i, i + 1) for i in range(len(agents))]
    route = [
        common_pb2.Hop(
            agent_id=agent,
            model=MODEL.name,
            model_version=MODEL.version,
            first_block=first,
            last_block=last,
            reserved_start_ns=start_ns,
            reserved_duration_ns=5_000_000,
        )
        for agent, (first, last) in zip(agents, blocks, strict=True)
    ]
    part = common_pb2.Slice(
        gateway_id=gateway,
        request_id=request,
        rows=rows,
        batch_row=first_row,
        traceparent=traceparent,
    )
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_FEATURE_MAP,
        epoch=epoch,
        batch_id=batch_id,
        batch_rows=rows if batch_rows is None else batch_rows,
        first_row=first_row,
        rows=rows,
        slices=[part],
        route=route,
        position=position,
        budget_ns=budget_ns,
        plan_id="p",
    )


async def entered(executor: ScriptedExecutor, timeout_s: float = 30.0) -> None:
    """Waits until the executor runs."""
    assert await asyncio.to_thread(executor.entered.wait, timeout_s)


def x(rows: int, start: float = 0.0, width: int = 4) -> np.ndarray:
    """Returns rows that can be told apart."""
    return (start + np.arange(rows * width, dtype=np.float32)).reshape(rows, width)


INSECURE = (ClientSecurity(insecure=True), ServerSecurity(insecure=True))
