"""A real gateway between scripted peers: a scheduler that answers by script, an agent that echoes.

Everything between them is real: control streams, transports, endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc.aio
import numpy as np
from opentelemetry.sdk.trace.export import SpanExporter

from catenary_gateway.process import GatewayProcess
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    frame_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from catenary_services.errors import CatenaryError, Unavailable
from catenary_services.grpc.error_tables import abort
from catenary_services.grpc.grpc_kit import bind, create_server
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.security.tls import ServerSecurity
from catenary_services.transport.frames import layout, tensor_views
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import ReceivedFrame
from catenary_services.transport.settings import TransportSettings
from shared_helpers.control_streams import ScriptedEnd, ScriptedEndpoint
from shared_helpers.peers import peer_of
from shared_helpers.waiting import until

AGENT = "agent-0"
GATEWAY = "gateway-t"
Down = scheduler_pb2.SchedulerToGatewayMessage


def spec(name: str, datatype: str, *shape: int) -> common_pb2.TensorSpec:
    return common_pb2.TensorSpec(name=name, datatype=datatype, shape=shape)


def served(
    name: str,
    inputs: Sequence[common_pb2.TensorSpec],
    outputs: Sequence[common_pb2.TensorSpec],
    **facts: object,
) -> scheduler_pb2.ServedModel:
    known = {"version": "1", "ready": True, "batched": True, "default_slo_ns": 10**10}
    return scheduler_pb2.ServedModel(
        name=name, platform="onnxruntime_onnx", inputs=inputs, outputs=outputs, **(known | facts)
    )


def echo(name: str, *tensors: tuple[object, ...], **facts: object) -> scheduler_pb2.ServedModel:
    """A model whose output out_N is its input in_N; tensors are (datatype, dimensions...)."""
    return served(
        name,
        [spec(f"in_{at}", *tensor) for at, tensor in enumerate(tensors)],
        [spec(f"out_{at}", *tensor) for at, tensor in enumerate(tensors)],
        **facts,
    )


MODELS = [
    echo("toy", ("FP32", -1, 4)),
    echo("pair", ("FP32", -1, 2), ("INT64", -1)),
    echo("half", ("FP16", -1, 2)),
    echo("text", ("BYTES", -1, 2)),
    echo("flags", ("BOOL", -1), ("UINT8", -1)),
    echo("whole", ("FP64", 3), batched=False),
    echo("free", ("FP32", -1, -1)),
    echo("cold", ready=False, not_ready_reason="model.yaml is wrong"),
]


class ScriptedScheduler(ScriptedEndpoint, admin_pb2_grpc.AdminServicer):
    """Records what the gateway says; answers submissions with `script`."""

    def __init__(self, models: Sequence[scheduler_pb2.ServedModel] = MODELS) -> None:
        super().__init__()
        self.models = list(models)
        self.epoch = 1
        self.standby = False
        self.group = ""
        """The only scheduler group it leads; empty: calls name none."""
        self.peers: list[common_pb2.Peer] = []
        self.script: Callable[[scheduler_pb2.SubmitRequest], list[Down]] = self.one_batch
        self.session_script: Callable[[scheduler_pb2.SubmitSession], list[Down]] = lambda _: []
        self.answers: dict[str, Callable[[object], object]] = {}
        """To calls of operators, by their methods."""
        self.presented: list[str] = []
        """What came as `authorization` with orders that change the cluster."""
        self.undeployed: list[str] = []
        """Models that were to be served no longer."""
        self.presented_to_look = ""
        """What came as `authorization` with the last call for the status."""
        self.gateway = GATEWAY
        self.heard: asyncio.Queue[scheduler_pb2.GatewayMessage] = asyncio.Queue()
        self.sessions = 0
        self._out: asyncio.Queue[Down | None] = asyncio.Queue()
        self._batches = 0
        self._server: GrpcServer | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = create_server(ServerSecurity(insecure=True))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", port, ServerSecurity(insecure=True))
        await self.listen()
        await self._server.start()

    async def stop(self) -> None:
        await self.hang_up()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def send(self, *messages: Down) -> None:
        for message in messages:
            self._out.put_nowait(message)

    async def hear(self, kind: str, timeout_s: float = 30.0) -> object:
        """The next message of this kind; others are skipped."""
        async with asyncio.timeout(timeout_s):
            while True:
                message = await self.heard.get()
                if message.WhichOneof("kind") == kind:
                    return getattr(message, kind)

    def one_batch(self, submit: scheduler_pb2.SubmitRequest) -> list[Down]:
        return [self.batch([(submit.request_id, 0, submit.rows, 0)])]

    def batch(
        self, slices: Sequence[tuple[int, int, int, int]], *, agent: str = AGENT, rows: int = 0
    ) -> Down:
        """An order; slices are (request, request_row, rows, batch_row)."""
        self._batches += 1
        pieces = [
            common_pb2.Slice(
                gateway_id=self.gateway, request_id=r, request_row=q, rows=n, batch_row=b
            )
            for r, q, n, b in slices
        ]
        return Down(
            dispatch=scheduler_pb2.DispatchBatch(
                epoch=self.epoch,
                batch_id=self.epoch << 40 | self._batches,
                batch_rows=rows or sum(piece.rows for piece in pieces),
                slices=pieces,
                route=[common_pb2.Hop(agent_id=agent, model="m", last_block=1)],
                expected_after_ns=50_000_000,
            )
        )

    def refusal(self, group: int) -> CatenaryError | None:
        is_asked = group == int(self.group or "0")
        return Unavailable("standby") if self.standby or not is_asked else None

    async def serve(self, end: ScriptedEnd) -> None:
        self.sessions += 1
        self._out = asyncio.Queue()
        self.send(
            Down(welcome=scheduler_pb2.Welcome(scheduler_id="s", epoch=self.epoch)),
            Down(directory=scheduler_pb2.Directory(peers=self.peers)),
            Down(models=scheduler_pb2.ModelTable(models=self.models)),
        )
        writer = asyncio.create_task(self._write(end, self._out))
        try:
            while (pack := await end.read()) is not None:
                for message in pack.messages:
                    kind = message.WhichOneof("kind")
                    if kind == "heartbeat":
                        self.send(Down(heartbeat=scheduler_pb2.Heartbeat()))
                        continue
                    if message.unanswered == scheduler_pb2.Unanswered() and kind == "unanswered":
                        continue  # it came with nothing to say
                    self.heard.put_nowait(message)
                    if kind == "submit":
                        self.send(*self.script(message.submit))
                    elif kind == "submit_session":
                        self.send(*self.session_script(message.submit_session))
        finally:
            writer.cancel()

    async def _write(self, end: ScriptedEnd, out: asyncio.Queue[Down]) -> None:
        while True:
            pack = scheduler_pb2.SchedulerToGatewayMessages(messages=[await out.get()])
            while not out.empty():
                pack.messages.append(out.get_nowait())
            await end.write(pack)

    async def GetStatus(self, request, context):  # noqa: N802
        self.presented_to_look = authorization_of(context)
        if "GetStatus" in self.answers:
            return self.answers["GetStatus"](request)
        agents = [admin_pb2.AgentStatus(agent_id=f"of-{self.group or 's'}", state="ready")]
        return admin_pb2.GetStatusResponse(
            scheduler_id="s" + self.group, epoch=self.epoch, agents=agents, redis_connected=True
        )

    async def GetPlan(self, request, context):  # noqa: N802
        return self.answers["GetPlan"](request)

    async def GetTimelines(self, request, context):  # noqa: N802
        return self.answers["GetTimelines"](request)

    async def ListSessions(self, request, context):  # noqa: N802
        return self.answers["ListSessions"](request)

    async def GetStory(self, request, context):  # noqa: N802
        return self.answers["GetStory"](request)

    async def MoveSession(self, request, context):  # noqa: N802
        return self.answers["MoveSession"](request)

    async def DrainAgent(self, request, context):  # noqa: N802
        return await self._ordered("DrainAgent", request, context)

    async def Replan(self, request, context):  # noqa: N802
        return await self._ordered("Replan", request, context)

    async def _ordered(self, method, request, context):
        self.presented.append(authorization_of(context))
        try:
            return self.answers[method](request)
        except CatenaryError as error:
            await abort(context, error)

    async def DeployModel(self, request, context):  # noqa: N802
        self.presented.append(authorization_of(context))
        return admin_pb2.DeployModelResponse(plan_id=f"with {request.model}:{request.version}")

    async def UndeployModel(self, request, context):  # noqa: N802
        self.undeployed.append(request.model)
        return admin_pb2.UndeployModelResponse(plan_id=f"without {request.model}", version="1")

    async def UndrainAgent(self, request, context):  # noqa: N802
        self.presented.append(f"undrain {request.agent_id}")
        return admin_pb2.UndrainAgentResponse()

    async def ImportModel(self, request, context):  # noqa: N802
        said = dict(context.invocation_metadata())
        self.presented.append(str(said.get("authorization", "")))
        try:
            yield admin_pb2.ImportProgress(phase="listed", text=request.source)
            while "endless" in request.source:
                await asyncio.sleep(0.02)
                yield admin_pb2.ImportProgress(phase="fetching")
            yield admin_pb2.ImportProgress(phase="done", model="m", version="1")
        finally:
            self.presented.append("import ended")


def authorization_of(context: grpc.aio.ServicerContext) -> str:
    return str(dict(context.invocation_metadata()).get("authorization", ""))


@dataclass
class EchoAgent:
    """Sends every frame it gets back as a result, output out_N being input in_N."""

    hub: TransportHub
    agent_id: str = AGENT
    hold: bool = False
    copies: int = 1
    headers: list[frame_pb2.FrameHeader] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    held: list[tuple[frame_pb2.FrameHeader, bytes]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def receive(self, frame: ReceivedFrame) -> None:
        header = frame_pb2.FrameHeader.FromString(frame.header)
        payload = bytes(frame.payload)
        frame.release()
        self.headers.append(header)
        if self.hold:
            self.held.append((header, payload))
        else:
            self.answer(header, payload)
        self.arrived.set()

    def answer(self, header: frame_pb2.FrameHeader, payload: bytes) -> None:
        task = asyncio.create_task(self._answer(header, payload))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, header: frame_pb2.FrameHeader, payload: bytes) -> None:
        link = await self.hub.link_to(header.slices[0].gateway_id, 5.0)
        result = frame_pb2.FrameHeader()
        result.CopyFrom(header)
        result.kind = frame_pb2.FRAME_KIND_RESULT
        result.position = 1
        result.timings.add(agent_id=AGENT, last_block=1, wait_ns=1000, compute_ns=2000)
        for tensor in result.tensors:
            tensor.name = tensor.name.replace("in_", "out_")
        for _ in range(self.copies):
            slot = await link.export(len(payload), 5.0)
            slot.view[:] = payload
            await link.push(slot, result.SerializeToString(), 5.0)


@dataclass
class Endpoints:
    """Where a gateway is asked."""

    gateway: GatewayProcess

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.gateway.grpc_port}"

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.gateway.http_port}"

    @property
    def admin(self) -> str:
        return f"127.0.0.1:{self.gateway.admin_port}"


@dataclass
class Stage(Endpoints):
    """A gateway and its scripted peers."""

    scheduler: ScriptedScheduler
    agent: EchoAgent


class ScriptedAgent(Protocol):
    """An agent that frames come to."""

    agent_id: str
    hub: TransportHub
    tasks: set[asyncio.Task[None]]

    def receive(self, frame: ReceivedFrame) -> None: ...


@asynccontextmanager
async def gateway_among(
    tmp_path: Path,
    scheduler: ScriptedScheduler,
    agents: Sequence[ScriptedAgent],
    *,
    exporter: SpanExporter | None = None,
    wait: bool = True,
    **settings: object,
) -> AsyncIterator[GatewayProcess]:
    """Starts a gateway after its peers, and introduces all; `settings` are the gateway's."""
    await scheduler.start()
    for agent in agents:
        await agent.hub.start(agent.receive)
        scheduler.peers.append(peer_of(agent.agent_id, agent.hub))
    known = {
        "gateway_id": GATEWAY,
        "grpc_port": 0,
        "http_port": 0,
        "admin_port": 0,
        "insecure": True,
        "scheduler_addresses": [f"127.0.0.1:{scheduler.port}"],
        "runtime_dir": tmp_path / "run",
    }
    gateway = GatewayProcess(GatewaySettings(**(known | settings)), exporter=exporter)
    try:
        await gateway.start()
        if wait:
            hello = await scheduler.hear("hello")
            for agent in agents:
                agent.hub.update_directory([hello.peer])
            await until(lambda: gateway._catalog.known, "it knows the models")
            # Starting a process for each model takes a while, which no request is to wait for.
            await asyncio.gather(*gateway._codecs._loads.values(), return_exceptions=True)
        yield gateway
    finally:
        await gateway.stop()
        for agent in agents:
            for task in list(agent.tasks):
                task.cancel()
            await agent.hub.close()
        await scheduler.stop()


@asynccontextmanager
async def stage(
    tmp_path: Path, *, exporter=None, wait: bool = True, **settings
) -> AsyncIterator[Stage]:
    """Starts everything; `settings` are the gateway's."""
    scheduler = ScriptedScheduler()
    agent = EchoAgent(TransportHub(AGENT, TransportSettings(runtime_dir=tmp_path / "run")))
    started = gateway_among(tmp_path, scheduler, [agent], exporter=exporter, wait=wait, **settings)
    async with started as gateway:
        yield Stage(gateway, scheduler, agent)


def rows_of(values: np.ndarray, header: frame_pb2.FrameHeader, payload: bytes) -> np.ndarray:
    """The one tensor of a frame."""
    return next(iter(tensor_views(header.tensors, memoryview(payload)).values()))


__all__ = ["MODELS", "EchoAgent", "ScriptedScheduler", "Stage", "layout", "stage"]
