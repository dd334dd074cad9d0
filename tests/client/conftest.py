"""A real gRPC server on a free port: inference, admin and (if asked) generation, in a few lines."""

# ruff: noqa: N802 - methods are named as in the protocol

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import trustme
from grpc_status import rpc_status

import catenary
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.errors import (
    CatenaryError,
    ContentMismatch,
    ModelNotFound,
    PartitionLost,
    Unavailable,
)
from catenary_services.grpc import error_tables

STATUS = admin_pb2.GetStatusResponse(
    scheduler_id="scheduler-0",
    epoch=7,
    plan_id="plan-3",
    gateways=["gateway-0"],
    queued_requests=2,
    redis_connected=True,
    agents=[
        admin_pb2.AgentStatus(
            agent_id="agent-0",
            device="cpu",
            state="ready",
            partitions=["net:1[0,4)"],
            utilisation_ratio=0.5,
        )
    ],
    models=[
        admin_pb2.ModelStatus(name="net", version="1", ready=True, pipelines=1),
        admin_pb2.ModelStatus(
            name="llm",
            version="1",
            ready=True,
            sessions=3,
            chains=[
                admin_pb2.ChainStatus(
                    chain_id="llm:1/0",
                    capacity=4,
                    sessions=3,
                    service_ns=2_500_000_000,
                    hops=[
                        admin_pb2.ChainHopStatus(agent_id="agent-0", last_block=4),
                        admin_pb2.ChainHopStatus(agent_id="agent-1", first_block=4, last_block=9),
                    ],
                    role="decode",
                    lines=admin_pb2.LatencyLines(decode_ns=7.5e6),
                )
            ],
        ),
    ],
    sessions_in_flight=3,
)

TRACE = admin_pb2.GetTraceResponse(
    model="net:1",
    outcome="OK",
    total_ns=20_000_000,
    trace_id="ab" * 16,
    spans=[
        admin_pb2.TraceSpan(name="gateway.queue", process="gateway-0", duration_ns=5_000_000),
        admin_pb2.TraceSpan(
            name="agent.compute",
            process="agent-0",
            start_ns=5_000_000,
            duration_ns=10_000_000,
            attempt=2,
        ),
    ],
)


SWITCH = admin_pb2.PlanSwitch(
    from_plan="plan-4",
    to_plan="plan-6",
    phase="done",
    cause="it was asked for by hand",
    duration_ns=3_000_000_000,
    downtime=[admin_pb2.ModelDowntime(model="net", version="1", downtime_ns=21_000_000)],
)


class Server:
    """What a test sees of the server: what arrived, and what to answer next."""

    def __init__(self) -> None:
        self.requests: list[oip.ModelInferRequest] = []
        self.deadlines: list[float | None] = []
        self.metadata: list[dict[str, Any]] = []
        self.orders: list[Any] = []
        self.status = STATUS
        self.last_switch: admin_pb2.PlanSwitch | None = None
        # Raised by the next calls, oldest first: an error, or (code, text, trailers).
        self.failures: deque[Any] = deque()
        # While clear, inference waits; `waiting` says that one does.
        self.go = threading.Event()
        self.go.set()
        self.waiting = threading.Event()
        self.cancelled = threading.Event()
        self.reply: Callable[[oip.ModelInferRequest], oip.ModelInferResponse] = echo
        self.target = ""
        # It goes away when it would say this word; and it knows how answers go on.
        self.last_word = ""
        self.goes_on = True

    def saw(self, context: grpc.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            failure = self.failures.popleft()
            if isinstance(failure, CatenaryError):
                status = error_tables.rpc_status(failure)
                context.abort_with_status(rpc_status.to_status(status))
            code, text, trailers = failure
            context.set_trailing_metadata(trailers)
            context.abort(code, text)


def echo(request: oip.ModelInferRequest) -> oip.ModelInferResponse:
    """Answers with the inputs as outputs."""
    reply = oip.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version or "1", id=request.id
    )
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        reply.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        reply.raw_output_contents.append(raw)
    reply.parameters["triton_final_response"].bool_param = True
    return reply


class Inference(oip_grpc.GRPCInferenceServiceServicer):
    def __init__(self, server: Server) -> None:
        self.server = server

    def ModelInfer(self, request, context):
        self.server.requests.append(request)
        remaining = context.time_remaining()
        # Without a deadline grpcio reports one in the far future, or None.
        far = remaining is None or remaining > 1e6
        self.server.deadlines.append(None if far else remaining)
        context.add_callback(self.server.cancelled.set)
        self.server.saw(context)
        self.server.waiting.set()
        assert self.server.go.wait(20)
        return self.server.reply(request)

    def ModelStreamInfer(self, request_iterator, context):
        self.server.saw(context)
        context.add_callback(self.server.cancelled.set)
        for request in request_iterator:
            self.server.requests.append(request)
            if request.model_name == "absent":
                reply = oip.ModelInferResponse(id=request.id, model_name="absent")
                yield oip.ModelStreamInferResponse(
                    error_message="[MODEL_NOT_FOUND] no model 'absent'", infer_response=reply
                )
            else:
                yield oip.ModelStreamInferResponse(infer_response=self.server.reply(request))

    def ServerLive(self, request, context):
        self.server.saw(context)
        return oip.ServerLiveResponse(live=True)

    def ServerReady(self, request, context):
        return oip.ServerReadyResponse(ready=False)

    def ModelReady(self, request, context):
        return oip.ModelReadyResponse(ready=request.name == "net")

    def RepositoryIndex(self, request, context):
        models = [
            oip.RepositoryIndexResponse.ModelIndex(name="net", version="1", state="READY"),
            oip.RepositoryIndexResponse.ModelIndex(
                name="big", version="2", state="UNAVAILABLE", reason="no agent has room"
            ),
        ]
        self.server.saw(context)
        return oip.RepositoryIndexResponse(models=models)

    def ModelMetadata(self, request, context):
        self.server.saw(context)
        shapes = {
            "net": ("FP32", [-1, 3, 8, 12]),
            "numbers": ("INT32", [-1, 4]),
            "words": ("BYTES", [1]),
        }
        if request.name not in shapes:
            status = error_tables.rpc_status(ModelNotFound(f"no model '{request.name}'"))
            context.abort_with_status(rpc_status.to_status(status))
        datatype, shape = shapes[request.name]
        tensor = oip.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=shape)
        return oip.ModelMetadataResponse(
            name=request.name, versions=["1"], platform="onnx", inputs=[tensor], outputs=[tensor]
        )


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, server: Server) -> None:
        self.server = server

    def GetStatus(self, request, context):
        self.server.saw(context)
        return self.server.status

    def GetPlan(self, request, context):
        return admin_pb2.GetPlanResponse(
            plan_json=json.dumps({"models": [{"name": "net"}]}),
            explanation="net on agent-0",
            last_switch=self.server.last_switch,
        )

    def SearchPlan(self, request, context):
        self.server.saw(context)
        self.server.orders.append(request)
        answer = admin_pb2.SearchPlanResponse(model=request.model, version="1", notes=["by hand"])
        chosen = answer.options.add(
            shape="whole replicas",
            possible=True,
            predicted=True,
            throughput_per_s=120.5,
            latency_ns=35_000_000,
            attainment_ratio=1.0,
            gpus=1,
            survives=False,
            binds="the computing time of its agents",
        )
        pool = chosen.pipelines.add(batch=8).stages.add(last_block=9)
        pool.agent_ids.append("new-1")
        answer.options.add(shape="pools", why_not="it would not survive the loss of an agent")
        answer.idle.add(gpu="old-1", why="it is too slow")
        return answer

    def ApplyPlan(self, request, context):
        self.server.saw(context)
        self.server.orders.append(json.loads(request.plan_json))
        return admin_pb2.ApplyPlanResponse(plan_id="plan-4")

    def Replan(self, request, context):
        changed = self.server.last_switch is None
        self.server.last_switch = SWITCH
        return admin_pb2.ReplanResponse(
            plan_id="plan-6", changed=changed, plan_switch=SWITCH if changed else None
        )

    def DeployModel(self, request, context):
        self.server.orders.append(request)
        self.server.saw(context)
        return admin_pb2.DeployModelResponse(plan_id="plan-5")

    def UndeployModel(self, request, context):
        self.server.orders.append(request)
        self.server.saw(context)
        return admin_pb2.UndeployModelResponse(plan_id="plan-7", version=request.version or "1")

    def ImportModel(self, request, context):
        self.server.orders.append(request)
        self.server.saw(context)
        listed = admin_pb2.ImportProgress(
            phase="listed", text="2 files, 0.9 MB", total_bytes=900_000
        )
        yield listed
        if "broken" in request.source:
            error = ContentMismatch("hf:org/broken: model.safetensors is not what its source says")
            context.abort_with_status(rpc_status.to_status(error_tables.rpc_status(error)))
        for done in (300_000, 900_000):
            yield admin_pb2.ImportProgress(
                phase="fetching", file="model.safetensors", done_bytes=done, total_bytes=900_000
            )
        yield admin_pb2.ImportProgress(phase="importing", text="checking the weights")
        if "cut" in request.source:
            return
        yield admin_pb2.ImportProgress(
            phase="done", model=request.name or "tiny", version="3", total_bytes=900_000
        )

    def UndrainAgent(self, request, context):
        self.server.orders.append(request)
        return admin_pb2.UndrainAgentResponse()

    def DrainAgent(self, request, context):
        return admin_pb2.DrainAgentResponse(drained=request.agent_id == "agent-0")

    def ListSessions(self, request, context):
        self.server.saw(context)
        answer = admin_pb2.ListSessionsResponse()
        session = answer.sessions.add(
            session_id=1 << 40 | 7,
            gateway_id="gateway-0",
            request_id="mine",
            model="chatty",
            version="1",
            chain_id="chatty/0",
            tokens=90,
            moving_to="chatty/1",
            moving_by="kv",
            generates=True,
        )
        session.hops.add(agent_id="agent-0", last_block=30)
        if request.model == "net":
            del answer.sessions[:]
        return answer

    def GetStory(self, request, context):
        self.server.saw(context)
        self.server.orders.append(request)
        change = {"ago_ns": 1_500_000_000, "event": 41, "event_kind": "SessionFailed"}
        placed = {"session_id": 1 << 40 | 7, "before": "new", "after": "starting"}
        lost = {"before": "running", "after": "waiting", "why": "agent-0: COMPUTE_FAILED"}
        return admin_pb2.GetStoryResponse(
            changes=[
                admin_pb2.StateChange(name="session lost", **change, **lost),
                admin_pb2.StateChange(name="started", **change, **placed),
            ]
        )

    def MoveSession(self, request, context):
        self.server.saw(context)
        self.server.orders.append(request)
        if request.chain_id == "full":
            return admin_pb2.MoveSessionResponse(outcome="failed", problem="it took too long")
        return admin_pb2.MoveSessionResponse(
            outcome="moved" if request.wait_ns else "begun",
            session_id=1 << 40 | 8,
            tokens=88,
            chain_id=request.chain_id or "chatty/1",
            mode=request.mode or "kv",
            rounds=2,
            duration_ns=30_000_000,
            held_ns=1_500_000,
        )

    def GetTrace(self, request, context):
        self.server.saw(context)
        answer = admin_pb2.GetTraceResponse()
        answer.CopyFrom(TRACE)
        answer.request_id = request.request_id or "latest"
        return answer

    def ListRequests(self, request, context):
        self.server.saw(context)
        return admin_pb2.ListRequestsResponse(
            requests=[
                admin_pb2.RecentRequest(
                    request_id=f"r{at}",
                    model="net:1",
                    outcome="OVERLOADED" if at else "OK",
                    total_ns=20_000_000,
                    ended_ago_ns=at * 1_500_000_000,
                )
                for at in range(min(request.limit, 3))
            ]
        )


class Generation(generation_pb2_grpc.GenerationServicer):
    """Says what it was told, in capitals and word by word; one token a word."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def Generate(self, request, context):
        self.server.orders.append(request)
        remaining = context.time_remaining()
        self.server.deadlines.append(None if remaining is None or remaining > 1e6 else remaining)
        context.add_callback(self.server.cancelled.set)
        self.server.saw(context)
        said = request.messages[-1].content if request.messages else request.prompt
        words = said.split()[: request.sampling.max_tokens or None]
        begin = len(request.generated_token_ids) if self.server.goes_on else 0
        for index, word in enumerate(words[begin:], begin):
            if word == self.server.last_word:
                gone = error_tables.rpc_status(Unavailable("the gateway stopped"))
                context.abort_with_status(rpc_status.to_status(gone))
            if word == "fail":
                status = error_tables.rpc_status(PartitionLost("agent-1 is gone"))
                context.abort_with_status(rpc_status.to_status(status))
            reply = generation_pb2.GenerateResponse(
                id=request.id,
                text=word.upper() + " ",
                token_ids=[index],
                generated_before=index if self.server.goes_on else 0,
            )
            if request.timings:
                reply.timings.append(timing_of(index))
            if request.sampling.HasField("logprobs"):
                reply.logprobs.append(scored_of(index))
            if request.sampling.HasField("prompt_logprobs") and not index:
                reply.prompt_logprobs.extend([scored_of(7), scored_of(8)])
            yield reply
            if word == "wait":
                self.server.waiting.set()
                self.server.cancelled.wait(20)
        if "cut" not in words:
            usage = generation_pb2.Usage(prompt_tokens=2, completion_tokens=len(words))
            last = generation_pb2.GenerateResponse(id=request.id, finish_reason="stop", usage=usage)
            if self.server.goes_on:
                last.generated_before = len(words)
            if request.time_to_first_token_slo_ns:
                last.objectives.CopyFrom(objectives_of(request))
            yield last


def objectives_of(request: generation_pb2.GenerateRequest) -> generation_pb2.ObjectivesReport:
    """What came of a request: a first token after 90 ms, 95 predicted, and then 20 per token."""
    return generation_pb2.ObjectivesReport(
        time_to_first_token_slo_ns=request.time_to_first_token_slo_ns,
        time_to_first_token_ns=90_000_000,
        time_per_output_token_ns=20_000_000,
        predicted_time_to_first_token_ns=95_000_000,
        met=request.time_to_first_token_slo_ns >= 90_000_000,
    )


def scored_of(token_id: int) -> generation_pb2.TokenLogprobs:
    """A token that is the second likeliest."""
    made = generation_pb2.TokenLogprobs(token_id=token_id, logprob=-1.5, rank=2)
    made.top.add(token_id=99, logprob=-0.5)
    return made


def timing_of(index: int) -> generation_pb2.TokenTiming:
    """A token on its way through two agents."""
    hops = [
        common_pb2.HopTiming(
            agent_id=f"agent-{hop}",
            first_block=4 * hop,
            last_block=4 * hop + 4,
            transfer_ns=100_000,
            wait_ns=200_000,
            compute_ns=5_000_000 + hop,
            send_ns=50_000,
        )
        for hop in range(2)
    ]
    return generation_pb2.TokenTiming(token_id=index, since_previous_ns=12_500_000, hops=hops)


def serve(
    credentials: grpc.ServerCredentials | None = None, *, generation: bool = False
) -> tuple[Server, grpc.Server]:
    """Starts a server on a free port of the loopback interface."""
    server = Server()
    limits = [("grpc.max_receive_message_length", 32 << 20), ("grpc.so_reuseport", 0)]
    running = grpc.server(futures.ThreadPoolExecutor(16), options=limits)
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(Inference(server), running)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(server), running)
    if generation:
        generation_pb2_grpc.add_GenerationServicer_to_server(Generation(server), running)
    if credentials is None:
        port = running.add_insecure_port("127.0.0.1:0")
    else:
        port = running.add_secure_port("127.0.0.1:0", credentials)
    running.start()
    server.target = f"127.0.0.1:{port}"
    return server, running


@pytest.fixture
def server() -> Iterator[Server]:
    state, running = serve()
    yield state
    state.go.set()
    running.stop(0).wait()


@pytest.fixture
def generating_server() -> Iterator[Server]:
    state, running = serve(generation=True)
    yield state
    running.stop(0).wait()


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """Two gateways, of which clients begin with the first."""
    monkeypatch.setattr("random.randrange", lambda _: 0)
    (first, running), (second, other) = serve(generation=True), serve(generation=True)
    yield first, second
    running.stop(0).wait()
    other.stop(0).wait()


@pytest.fixture
def lost_target() -> str:
    """Where a gateway was."""
    gone, running = serve()
    running.stop(0).wait()
    return gone.target


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure_server(authority: trustme.CA, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Speaks TLS; asks for a client certificate if the test is parametrised with True."""
    certificate = authority.issue_cert("catenary.test")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    credentials = grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), chain)],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=getattr(request, "param", False),
    )
    state, running = serve(credentials)
    yield state
    running.stop(0).wait()


class StreamAsAsync:
    """A `TextStream` with the methods of an `AsyncTextStream`."""

    def __init__(self, stream: catenary.TextStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self):
        return self

    async def __anext__(self) -> catenary.GeneratedText:
        piece = await asyncio.to_thread(next, self._stream, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def result(self) -> catenary.GenerationResult:
        return await asyncio.to_thread(self._stream.result)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._stream.close)

    async def __aenter__(self) -> StreamAsAsync:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class BlockingAsAsync:
    """Runs the blocking client on threads, so that one test covers both clients."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._client = catenary.Client(*args, **settings)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name in {"chat", "generate"}:

            def ask(*args: Any, stream: bool = False, **settings: Any) -> Any:
                if not stream:
                    return asyncio.to_thread(method, *args, **settings)
                return StreamAsAsync(method(*args, stream=True, **settings))

            return ask
        if name == "infer_stream":

            async def stream(*args: Any, **settings: Any):
                replies = await asyncio.to_thread(lambda: list(method(*args, **settings)))
                for reply in replies:
                    yield reply

            return stream
        return lambda *args, **settings: asyncio.to_thread(method, *args, **settings)


@pytest.fixture(params=["blocking", "asyncio"])
async def connect(request: pytest.FixtureRequest):
    """Makes clients of either kind with the methods of `AsyncClient`; closes them."""
    kind = BlockingAsAsync if request.param == "blocking" else catenary.AsyncClient
    made: list[Any] = []

    def make(server: Server | str, **settings: Any) -> Any:
        target = server if isinstance(server, str) else server.target
        made.append(kind(target, **{"admin_target": target, **settings}))
        return made[-1]

    yield SimpleNamespace(to=make)
    for client in made:
        await client.close()
