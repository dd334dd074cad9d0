from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_agent.process import AgentProcess
from catenary_agent.settings import AgentSettings
from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import CatenaryError, Unavailable
from catenary_services.grpc.grpc_kit import bind, create_server
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.tls import ServerSecurity
from shared_helpers.control_streams import ScriptedEnd, ScriptedEndpoint
from tests.support.agent_harness import SECOND_NS, open_net

WIDTH = 64


class ScriptedScheduler(ScriptedEndpoint):
    """A scheduler whose part is read from a script: the test. Listens in this process."""

    def __init__(self, epoch: int = 1, *, standby: bool = False) -> None:
        super().__init__()
        self.epoch = epoch
        self.standby = standby
        self.groups: list[int] = []
        """The scheduler group each stream named."""
        self.heard: list[scheduler_pb2.AgentMessage] = []
        self.sessions = 0
        self._changed = asyncio.Event()
        self._ends: list[ScriptedEnd] = []
        self._server = None
        self.port = 0

    async def start(self, port: int = 0) -> ScriptedScheduler:
        security = ServerSecurity(insecure=True)
        self._server = create_server(security)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", port, security)
        await self.listen()
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self.hang_up()
        if self._server is not None:
            await self._server.stop(grace=0)
            self._server = None

    def refusal(self, group: int) -> CatenaryError | None:
        return Unavailable("standby") if self.standby else None

    async def serve(self, end: ScriptedEnd) -> None:
        self.groups.append(end.group)
        hello = await end.read()
        welcome = scheduler_pb2.Welcome(scheduler_id="s", epoch=self.epoch)
        await end.write(self._packed(welcome=welcome))
        self.sessions += 1
        self._ends.append(end)
        self._note(hello)
        while (received := await end.read()) is not None:
            self._note(received)

    def _note(self, packed) -> None:
        self.heard.extend(packed.messages)
        self._changed.set()

    def _packed(self, epoch: int | None = None, **kind):
        message = scheduler_pb2.SchedulerToAgentMessage(
            epoch=self.epoch if epoch is None else epoch, **kind
        )
        return scheduler_pb2.SchedulerToAgentMessages(messages=[message])

    async def order(self, epoch: int | None = None, **kind) -> None:
        await self._ends[-1].write(self._packed(epoch, **kind))

    async def tell_all(self, **kind) -> None:
        """Says the same to every agent that is there; `order` speaks to the last one only."""
        for end in self._ends:
            await end.write(self._packed(**kind))

    async def order_when_there(self, **kind) -> None:
        """Orders as soon as an agent has said hello."""
        await self.wait_for("hello")
        await self.order(**kind)

    def of(self, kind: str) -> list:
        return [getattr(m, kind) for m in self.heard if m.WhichOneof("kind") == kind]

    async def wait_for(self, kind: str, count: int = 1, timeout_s: float = 20.0) -> list:
        async with asyncio.timeout(timeout_s):
            while len(self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)


def key(first: int, last: int, model: str = "tiny") -> scheduler_pb2.PartitionKey:
    return scheduler_pb2.PartitionKey(
        model=model, model_version="1", first_block=first, last_block=last
    )


def load(first: int, last: int, **options) -> scheduler_pb2.LoadPartition:
    return scheduler_pb2.LoadPartition(
        key=key(first, last), **{"max_batch": 4, "float16_boundaries": True, **options}
    )


class Bench:
    """Starts agents and schedulers of one test and stops them."""

    ScriptedScheduler = ScriptedScheduler
    key = staticmethod(key)
    load = staticmethod(load)

    def __init__(self, folder: Path, repository: ModelRepository, net) -> None:
        self.folder = folder
        self.repository = repository
        self.net = net
        self._stack = AsyncExitStack()

    async def scheduler(self, epoch: int = 1, *, port: int = 0, **options) -> ScriptedScheduler:
        scheduler = await ScriptedScheduler(epoch, **options).start(port)
        self._stack.push_async_callback(scheduler.stop)
        return scheduler

    async def agent(self, *ports: int, agent_id: str = "a-0", **options) -> AgentProcess:
        settings = AgentSettings(
            agent_id=agent_id,
            insecure=True,
            model_repository=self.repository.root,
            scheduler_addresses=[f"127.0.0.1:{port}" for port in ports],
            runtime_dir=self.folder,
            # Nothing here sends heartbeats.
            **{"silence_s": 60.0, "transports": ["shm", "tcp"], **options},
        )
        process = AgentProcess(settings)
        self._stack.push_async_callback(process.stop)
        await process.start()
        return process

    async def close(self) -> None:
        async with asyncio.timeout(20):
            await self._stack.aclose()


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> ModelRepository:
    """A repository with `tiny`: four dense layers, a block each."""
    made = ModelRepository(tmp_path_factory.mktemp("models"))
    model = ModelKey("tiny", "1")
    made.write_manifest(ModelManifest(model, "onnxruntime_onnx", "model.onnx", SECOND_NS, 8, True))
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for i in range(4):
        weight = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        out = "y" if i == 3 else f"r{i}"
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [out]))
        last = out
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, made.model_file(model))
    boundaries = [
        Boundary((TensorSpec(name, "FP32", (ANY, WIDTH)),), WIDTH * 4)
        for name in ("x", "r0", "r1", "r2", "y")
    ]
    table = BlockTable(made.model_hash(model), True, tuple(boundaries), (100_000,) * 4)
    made.write_block_table(model, table)
    return made


@pytest.fixture
async def bench(repository):
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="cat-") as folder:  # short: it holds Unix sockets
        async with open_net(Path(folder)) as net:
            opened = Bench(Path(folder), repository, net)
            try:
                yield opened
            finally:
                await opened.close()
    # gRPC's own tasks end a little after its server has stopped; ours have to have ended by then.
    ours = {t for t in asyncio.all_tasks() - before - {asyncio.current_task()} if not t.done()}
    if ours:
        await asyncio.wait(ours, timeout=2)
    leaked = {t for t in ours if not t.done() and "grpc" not in repr(t.get_coro())}
    assert not leaked, leaked
