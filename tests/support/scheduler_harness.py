"""A real scheduler process in this event loop, and scripted gateways and agents over real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from catenary_protos.catenary.v1 import admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_scheduler.agents.registry import AgentStream
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import grpc_code
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.identity import Role
from scheduling_cases.sized_decoders import decoder_table
from shared_helpers.control_streams import ScriptedEnd, opened
from shared_helpers.waiting import until

MS = 1_000_000
TOY = ModelKey("toy", "1")
COMPUTE_NS = 2 * MS


def add_model(root: Path, key: ModelKey = TOY, blocks: int = 4) -> ModelKey:
    """Writes a model of equal blocks; it has no file, which only agents would miss."""
    repository = ModelRepository(root)
    spec = TensorSpec("x", "FP32", (ANY, 16))
    boundaries = tuple(Boundary((spec,), 64) for _ in range(blocks + 1))
    repository.write_manifest(
        ModelManifest(key, "onnxruntime_onnx", "model.onnx", 2_000 * MS, 4, True)
    )
    table = BlockTable("0" * 64, True, boundaries, (COMPUTE_NS,) * blocks)
    repository.write_block_table(key, table)
    return key


LLM = ModelKey("llm", "1")
SESSION_TOKENS = 64


def add_decoder(
    root: Path,
    key: ModelKey = LLM,
    blocks: int = 6,
    max_batch: int = 4,
    slo_ns: int = 10_000 * MS,
    target: str = "both",
) -> ModelKey:
    """Writes a model that generates text: 100 bytes a block, 64 bytes a block slot, 50 each for
    the embedding and the head."""
    repository = ModelRepository(root)
    repository.write_manifest(
        ModelManifest(
            key,
            "decoder",
            "model.safetensors",
            slo_ns,
            max_batch,
            True,
            session_tokens=SESSION_TOKENS,
            target=target,
        )
    )
    repository.write_decoder_table(key, decoder_table(blocks=blocks))
    return key


def settings(tmp_path: Path, redis_url: str, **changes: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "port": 0,
        "insecure": True,
        "redis_url": redis_url,
        "models": ["toy"],
        "model_repository": tmp_path / "models",
        "settle_s": 0.05,
        "replan_after_s": 0.3,
        "recovery_s": 0.5,
        "lease_s": 2.0,
        "heartbeat_s": 0.1,
        "silence_s": 30.0,
        **changes,
    }
    return SchedulerSettings(**values)


@asynccontextmanager
async def scheduler(values: SchedulerSettings) -> AsyncIterator[SchedulerProcess]:
    process = SchedulerProcess(values)
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


async def crash(process: SchedulerProcess) -> None:
    """Ends a scheduler without a word to Redis, as kill -9 would: the lease is not given back."""
    await process.stop()


class Client:
    """One stream to a scheduler that keeps everything it is told."""

    role = Role.AGENT
    pack: Any = None

    def __init__(self, port: int, *hello: Any, group: int | None = None) -> None:
        self._address = f"127.0.0.1:{port}"
        self._group = group
        self._hello = hello
        self.end: ScriptedEnd | None = None
        self._task: asyncio.Task[None] | None = None
        self.received: list[Any] = []
        self.error: CatenaryError | None = None

    async def start(self) -> None:
        try:
            self.end = await opened(self._address, self.role, group=self._group)
            await self.send(*self._hello)
        except CatenaryError as error:
            self.error = error
        self._task = asyncio.create_task(self._read())

    async def send(self, *messages: Any) -> None:
        if self.end is not None:
            await self.end.write(self.pack(messages=messages))

    async def _read(self) -> None:
        if self.end is None:
            return
        while (packed := await self.end.read()) is not None:
            for message in packed.messages:
                self.received.append(message)
                await self.on_message(message)
        self.error = self.end.error

    @property
    def status(self) -> str:
        """Of the error by which the scheduler ended the stream."""
        return "OK" if self.error is None else grpc_code(self.error).name

    async def on_message(self, message: Any) -> None:
        """Answers what must be answered."""

    def all(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.received if m.WhichOneof("kind") == kind]

    async def close(self) -> None:
        if self.end is not None:
            self.end.stream.abort()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def ended(self) -> bool:
        return self._task is not None and self._task.done()


def unconnected() -> AgentStream:
    """A stream to an agent that is not there."""
    return PeerStream(ScriptedEnd().stream, scheduler_pb2.SchedulerToAgentMessages)


@dataclass
class AgentScript:
    """How a scripted agent behaves."""

    compute_ns: int = COMPUTE_NS
    fail_loads: int = 0
    partitions: list[scheduler_pb2.PartitionLoaded] = field(default_factory=list)
    batches: list[scheduler_pb2.BatchInAgent] = field(default_factory=list)
    epoch: int = 0
    leader: str = ""
    incarnation: int = 1
    lacks: set[str] = field(default_factory=set)
    """Models that are not in its repository."""
    hold_loads: bool = False
    memory_bytes: int = 10**9
    block_bytes: int = 2
    device_class: str = "cpu"
    device_facts: common_pb2.DeviceFacts | None = None
    virtual_level: int = 1
    sessions: list[scheduler_pb2.SessionInAgent] = field(default_factory=list)
    answers_closes: bool = True
    decode_ns: int = 10 * MS
    group: int | None = None
    content: str = ""
    """Digest of its copy of every model."""
    runtime: str = ""
    """What it runs decoders with."""
    address: str = ""
    """Where it says peers reach it; empty: nowhere."""


_HALVES = [{"blocks": [0, 2], "agents": ["agent-0"]}, {"blocks": [2, 4], "agents": ["agent-1"]}]
CUT_IN_TWO = {"models": [{"name": "toy", "pipelines": [{"batch": 2, "partitions": _HALVES}]}]}
"""A plan with the halves of the toy model on two agents."""


class FakeAgent(Client):
    role = Role.AGENT
    pack = scheduler_pb2.AgentMessages

    def __init__(self, port: int, name: str, script: AgentScript | None = None) -> None:
        self.name = name
        self.script = script or AgentScript()
        self.loaded: dict[tuple[int, int], scheduler_pb2.PartitionLoaded] = {}
        self.holds: scheduler_pb2.Holdings | None = None
        """What it answers audits; None: nothing, as an older one would."""
        peer = common_pb2.Peer(peer_id=name, incarnation=self.script.incarnation)
        if self.script.address:
            peer.addresses.add(transport="tcp", address=self.script.address, host_id=name)
        hello = scheduler_pb2.AgentHello(
            agent_id=name,
            incarnation=self.script.incarnation,
            peer=peer,
            device="cpu",
            device_class=self.script.device_class,
            memory_bytes=self.script.memory_bytes,
            server_id=name,
            virtual_level=self.script.virtual_level,
            link_bytes_per_second=10**9,
            epoch=self.script.epoch,
            leader=self.script.leader,
            partitions=self.script.partitions,
            batches=self.script.batches,
            sessions=self.script.sessions,
            decoder_runtime=self.script.runtime,
            device_facts=self.script.device_facts,
        )
        message = scheduler_pb2.AgentMessage(hello=hello)
        super().__init__(port, message, group=self.script.group)

    async def on_message(self, message: Any) -> None:
        if message.WhichOneof("kind") == "load_partition":
            await self._load(message.load_partition)
        elif message.WhichOneof("kind") == "unload_partition":
            key = message.unload_partition.key
            self.loaded.pop((key.first_block, key.last_block), None)
        elif message.WhichOneof("kind") == "close_sessions" and self.script.answers_closes:
            await self.closed(*message.close_sessions.session_ids)
        elif message.WhichOneof("kind") == "report_holdings" and self.holds is not None:
            self.holds.number = message.report_holdings.number
            await self.send(scheduler_pb2.AgentMessage(holdings=self.holds))

    def hold(self, *sessions: int, route: Any = ()) -> None:
        """Answers audits from now on: it hosts what is loaded, and has these sessions."""
        self.holds = scheduler_pb2.Holdings()
        for each in self.loaded.values():
            self.holds.partitions.add(key=each.key)
        for session in sessions:
            for hop in route:
                if hop.agent_id == self.name:
                    key = next(
                        each.key
                        for each in self.loaded.values()
                        if each.key.first_block <= hop.first_block < each.key.last_block
                    )
                    self.holds.sessions.add(session_id=session, route=[hop], partition=key)

    async def _load(self, order: scheduler_pb2.LoadPartition) -> None:
        if order.key.model in self.script.lacks:
            text = f"{order.key.model} is not in the model repository of this machine"
            failure = common_pb2.Failure(reason="NOT_FOUND", message=text)
            failed = scheduler_pb2.PartitionFailed(key=order.key, failure=failure)
            await self.send(scheduler_pb2.AgentMessage(partition_failed=failed))
            return
        if self.script.fail_loads:
            self.script.fail_loads -= 1
            failure = common_pb2.Failure(reason="INTERNAL", message="out of memory")
            failed = scheduler_pb2.PartitionFailed(key=order.key, failure=failure)
            await self.send(scheduler_pb2.AgentMessage(partition_failed=failed))
            return
        if self.script.content and order.content_digest not in ("", self.script.content):
            failure = common_pb2.Failure(reason="CONTENT_MISMATCH", message="another copy here")
            failed = scheduler_pb2.PartitionFailed(
                key=order.key, failure=failure, content_digest=self.script.content
            )
            await self.send(scheduler_pb2.AgentMessage(partition_failed=failed))
            return
        size = self.script.block_bytes * (order.key.last_block - order.key.first_block)
        used = sum(each.memory_bytes for each in self.loaded.values())
        if used + size > self.script.memory_bytes:
            failure = common_pb2.Failure(reason="PLAN_INFEASIBLE", message="does not fit")
            failed = scheduler_pb2.PartitionFailed(
                key=order.key, failure=failure, out_of_memory=True
            )
            await self.send(scheduler_pb2.AgentMessage(partition_failed=failed))
            return
        if self.script.hold_loads:
            return
        done = scheduler_pb2.PartitionLoaded(
            key=order.key, memory_bytes=size, content_digest=self.script.content
        )
        if order.HasField("cache"):
            done.generation.CopyFrom(self._cost(order))
        else:
            done.compute_ns.extend([self.script.compute_ns] * order.max_batch)
        self.loaded[order.key.first_block, order.key.last_block] = done
        await self.send(scheduler_pb2.AgentMessage(partition_loaded=done))

    def _cost(self, order: scheduler_pb2.LoadPartition) -> scheduler_pb2.GenerationCost:
        blocks = order.key.last_block - order.key.first_block
        return scheduler_pb2.GenerationCost(
            block_slots=order.cache.block_slots,
            session_tokens=order.cache.session_tokens,
            prefill_token_ns=MS * blocks,
            decode_ns=self.script.decode_ns * blocks,
        )

    async def closed(self, *sessions: int) -> None:
        said = scheduler_pb2.SessionsClosed(session_ids=sessions)
        await self.send(scheduler_pb2.AgentMessage(sessions_closed=said))

    async def fails(self, session: int) -> None:
        failure = common_pb2.Failure(reason="UNAVAILABLE", message="no way", retryable=True)
        said = scheduler_pb2.SessionFailed(session_id=session, failure=failure)
        await self.send(scheduler_pb2.AgentMessage(session_failed=said))

    async def moved(self, session: int, moved: int, **changes: Any) -> None:
        """Says that a session was handed over, then that it is over here."""
        said = scheduler_pb2.SessionMoved(session_id=session, moved_session_id=moved, **changes)
        await self.send(scheduler_pb2.AgentMessage(session_moved=said))
        await self.closed(moved)

    def told_to_close(self, session: int) -> bool:
        return any(session in order.session_ids for order in self.all("close_sessions"))

    async def report(self, batch_id: int, position: int) -> None:
        report = scheduler_pb2.StageReport(
            batch_id=batch_id, position=position, compute_ended_ago_ns=1, compute_ns=MS, rows=1
        )
        await self.send(scheduler_pb2.AgentMessage(stage_report=report))


class FakeGateway(Client):
    role = Role.GATEWAY
    pack = scheduler_pb2.GatewayMessages

    def __init__(
        self, port: int, name: str = "gateway-0", incarnation: int = 1, group: int | None = None
    ) -> None:
        hello = scheduler_pb2.GatewayHello(
            gateway_id=name,
            incarnation=incarnation,
            peer=common_pb2.Peer(peer_id=name, incarnation=incarnation),
        )
        super().__init__(port, scheduler_pb2.GatewayMessage(hello=hello), group=group)
        self.waits: dict[int, tuple[int, ...]] | None = None
        """What it answers audits: sessions by request; None: nothing, as an older one would."""

    async def on_message(self, message: Any) -> None:
        if message.WhichOneof("kind") != "report_unanswered" or self.waits is None:
            return
        said = scheduler_pb2.Unanswered(number=message.report_unanswered.number)
        for request, sessions in self.waits.items():
            believed = [
                scheduler_pb2.BelievedSession(session_id=each, sent_ago_ns=3600 * 1000 * MS)
                for each in sessions
            ]
            said.requests.add(request_id=request, sessions=believed)
        await self.send(scheduler_pb2.GatewayMessage(unanswered=said))

    async def submit(self, number: int, **changes: Any) -> None:
        values = {
            "request_id": number,
            "model": "toy",
            "model_version": "1",
            "rows": 1,
            "budget_ns": 2_000 * MS,
            **changes,
        }
        await self.send(scheduler_pb2.GatewayMessage(submit=scheduler_pb2.SubmitRequest(**values)))

    async def submit_session(self, number: int, **changes: Any) -> None:
        values = {
            "request_id": number,
            "model": "llm",
            "prompt_tokens": 8,
            "max_tokens": 8,
            "budget_ns": 8_000 * MS,
            **changes,
        }
        asked = scheduler_pb2.SubmitSession(**values)
        await self.send(scheduler_pb2.GatewayMessage(submit_session=asked))

    def starts(self, number: int) -> list[scheduler_pb2.StartSession]:
        return [start for start in self.all("start_session") if start.request_id == number]

    async def started(self, number: int, times: int = 1) -> scheduler_pb2.StartSession:
        await until(lambda: len(self.starts(number)) >= times, f"start {times} of {number}")
        return self.starts(number)[times - 1]

    async def progressed(self, *numbers: int, tokens: int = 1) -> None:
        """Says that requests have got so many tokens of their answers."""
        reports = [
            scheduler_pb2.SessionProgress(
                request_id=number, generated_tokens=tokens, first_token_ns=MS, decode_ns=MS
            )
            for number in numbers
        ]
        said = scheduler_pb2.SessionsProgressed(sessions=reports)
        await self.send(scheduler_pb2.GatewayMessage(sessions_progressed=said))

    def serves(self, name: str) -> bool:
        model = self.model(name)
        return model is not None and model.ready

    async def finished(self, number: int) -> None:
        done = scheduler_pb2.RequestFinished(request_id=number)
        await self.send(scheduler_pb2.GatewayMessage(finished=done))

    def model(self, name: str = "toy") -> scheduler_pb2.ServedModel | None:
        tables = self.all("models")
        found = [m for m in tables[-1].models if m.name == name] if tables else []
        return found[0] if found else None

    @property
    def ready(self) -> bool:
        model = self.model()
        return model is not None and model.ready

    def dispatches(self, number: int) -> list[scheduler_pb2.DispatchBatch]:
        return [
            batch
            for batch in self.all("dispatch")
            if any(piece.request_id == number for piece in batch.slices)
        ]

    async def dispatched(self, number: int, times: int = 1) -> scheduler_pb2.DispatchBatch:
        def enough() -> bool:
            return len(self.dispatches(number)) >= times

        await until(enough, f"dispatch {times} of request {number}")
        return self.dispatches(number)[times - 1]

    async def rejected(self, number: int) -> scheduler_pb2.RejectRequest:
        def found() -> list[scheduler_pb2.RejectRequest]:
            return [r for r in self.all("reject") if r.request_id == number]

        answer: list[scheduler_pb2.RejectRequest] = await until(found, f"refusal of {number}")
        return answer[0]


class Crowd:
    """Starts clients and closes them all at the end."""

    def __init__(self) -> None:
        self._clients: list[Client] = []

    async def agent(self, port: int, name: str, script: AgentScript | None = None) -> FakeAgent:
        agent = FakeAgent(port, name, script)
        await self._start(agent)
        return agent

    async def gateway(
        self,
        port: int,
        name: str = "gateway-0",
        incarnation: int = 1,
        group: int | None = None,
    ) -> FakeGateway:
        gateway = FakeGateway(port, name, incarnation, group)
        await self._start(gateway)
        return gateway

    async def serving(
        self,
        port: int,
        *scripts: AgentScript,
        agents: int = 1,
        named: str = "agent",
        model: str = "toy",
    ) -> tuple[FakeGateway, list[FakeAgent]]:
        """A gateway, and an agent for each script or so many plain ones, once they serve a model."""
        gateway = await self.gateway(port)
        crew = scripts or [AgentScript() for _ in range(agents)]
        started = [
            await self.agent(port, f"{named}-{number}", script)
            for number, script in enumerate(crew)
        ]
        await until(lambda: gateway.serves(model), f"{model} is served")
        return gateway, started

    async def _start(self, client: Client) -> None:
        self._clients.append(client)
        await client.start()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))


@asynccontextmanager
async def admin(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield admin_pb2_grpc.AdminStub(channel)


@asynccontextmanager
async def operated(values: SchedulerSettings) -> AsyncIterator[tuple[SchedulerProcess, Any]]:
    """A scheduler, and the calls of its operators."""
    async with scheduler(values) as process, admin(process.port) as stub:
        yield process, stub
