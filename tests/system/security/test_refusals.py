"""What must be refused, each with its status: at the endpoints, inside, by files, by Redis.

One row is one attempt against a real cluster with mutual TLS and API keys (or against the command or
Redis server it is about). Afterwards the cluster serves as before, and its book is empty.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from redis.exceptions import RedisError

import catenary
import figures
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.redis.redis_client import connect
from catenary_services.security.identity import Role
from catenary_services.security.key_file import revoke_keys
from catenaryd.commands.redis_acl import HEALTH, SCHEDULER, VIEW, acl_file
from cluster_harness import MODEL, running_cluster, wait_until
from deployed.redis_servers import RedisServer
from fault_cluster import install_images
from hostile.refusals import Attempt, Scene, bomb, command, make_keys
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CHAT = "smollm2-135m"
INFER = f"/v2/models/{MODEL}/infer"
COMPLETIONS = "/v1/chat/completions"
CALLERS: dict[str, tuple[list[str], dict[str, object]]] = {
    "root": (["*"], {}),
    "one": ([f"infer:{MODEL}"], {}),
    "viewer": (["view"], {}),
    "operator": (["admin"], {}),
    "slow": (["infer"], {"requests_per_s": 0.001, "burst": 1}),
    "ended": (["infer"], {"expires": "2020-01-01T00:00:00Z"}),
    "leaver": (["infer"], {}),
}
LIMIT_BYTES = 4 << 20


def chat(**fields: object) -> bytes:
    body = {"model": CHAT, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return json.dumps({**body, **fields}).encode()


def tensor(**parameters: object) -> bytes:
    entry = {"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    return json.dumps({"inputs": [entry], "parameters": parameters}).encode()


def gone(scene: Scene) -> str:
    """A key that worked, after it was taken out of the file of the running cluster."""
    assert scene.http("/v1/models", key="leaver") == "200"
    revoke_keys(scene.keys_file, "leaver")
    wait_until(lambda: scene.http("/v1/models", key="leaver") == "401", 5, "the key is refused")
    return scene.http(INFER, key="leaver", body=tensor())


def over_quota(scene: Scene) -> str:
    scene.http(INFER, key="slow", body=tensor())
    return scene.http(INFER, key="slow", body=tensor())


def urgent(scene: Scene) -> str:
    with catenary.Client(scene.cluster.grpc, api_key=scene.keys["one"], timeout_s=20) as client:
        name = client.model_metadata(MODEL).inputs[0].name
        try:
            client.infer(MODEL, {name: np.zeros((1, 3, 224, 224), np.float32)}, priority=7)
        except catenary.CatenaryError as error:
            return type(error).__name__
    return "OK"


def at_endpoint(what: str, path: str, expected: str, **how: Any) -> Attempt:
    return Attempt(f"http: {what}", lambda scene: scene.http(path, **how), expected)


DEEP = b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HTTP = [
    at_endpoint("no key", INFER, "401", body=tensor()),
    at_endpoint("a key nobody knows", INFER, "401", key="ctn_no", body=tensor()),
    at_endpoint("a key of 5000 letters", INFER, "401", key="x" * 5000, body=tensor()),
    at_endpoint(
        "another scheme", INFER, "401", body=tensor(), headers={"Authorization": "Basic eDp4"}
    ),
    at_endpoint("an expired key", INFER, "401", key="ended", body=tensor()),
    Attempt("http: a revoked key", gone, "401"),
    at_endpoint("to infer with a key that may look", INFER, "403", key="viewer", body=tensor()),
    at_endpoint("another model", COMPLETIONS, "403", key="one", body=chat()),
    at_endpoint(
        "a model that is not there, which one may not know",
        "/v2/models/secret/infer",
        "403",
        key="one",
        body=tensor(),
    ),
    Attempt("grpc: to be more urgent than allowed", urgent, "PermissionDeniedError"),
    at_endpoint(
        "to be more urgent than allowed, in a chat",
        COMPLETIONS,
        "403",
        key="slow",
        body=chat(priority=-7),
    ),
    Attempt("http: more than the quota", over_quota, "429"),
    at_endpoint(
        "a body that is too large", INFER, "413", key="root", body=b" " * (LIMIT_BYTES + 1)
    ),
    at_endpoint(
        "a body that unpacks to too much",
        INFER,
        "413",
        key="root",
        body=bomb(LIMIT_BYTES * 20),
        headers={"Content-Encoding": "gzip"},
    ),
    at_endpoint("JSON of great depth", INFER, "400", key="root", body=DEEP),
    at_endpoint("a header that is too long", "/v2", "400", headers={"X-Long": "x" * 70_000}),
    at_endpoint(
        "a path as model",
        "/v2/models/..%2f..%2fetc%2fpasswd/infer",
        "404",
        key="root",
        body=tensor(),
    ),
    at_endpoint(
        "a path as version",
        f"/v2/models/{MODEL}/versions/..%2f..%2f1/infer",
        "404",
        key="root",
        body=tensor(),
    ),
    at_endpoint("a file of the dashboard's folder", "/dashboard/assets/..%2fapi.py", "404"),
    at_endpoint("a file of the machine", "/dashboard/assets/%2fetc%2fpasswd", "404"),
    at_endpoint("status without a key", "/dashboard/v1/status", "401"),
    at_endpoint("status with a key that infers", "/dashboard/v1/status", "403", key="one"),
    at_endpoint("too many answers", COMPLETIONS, "400", key="root", body=chat(n=129)),
    at_endpoint(
        "a prompt beyond the context",
        COMPLETIONS,
        "400",
        key="root",
        body=chat(messages=[{"role": "user", "content": "word " * 20_000}]),
    ),
    at_endpoint(
        "more tokens than there can be", COMPLETIONS, "400", key="root", body=chat(max_tokens=10**9)
    ),
    at_endpoint(
        "a role that runs code in the template",
        COMPLETIONS,
        "400",
        key="root",
        body=chat(messages=[{"role": {"__class__": 1}, "content": "{{ x.__class__ }}"}]),
    ),
]


def infer_message(model: str = MODEL, nbytes: int = 8) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model)
    request.inputs.add(name="input", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(bytes(nbytes))
    return request


def endpoint(what: str, expected: str, key: str = "", *, extra: int = 0, **message: Any) -> Attempt:
    def run(scene: Scene) -> str:
        def call(channel: grpc.Channel, metadata: Any) -> object:
            given = (*metadata, ("x-extra", "x" * extra)) if extra else metadata
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            return stub.ModelInfer(infer_message(**message), metadata=given, timeout=20)

        return scene.endpoint(scene.cluster.grpc, call, key)

    return Attempt(f"grpc: {what}", run, expected)


def operate(what: str, method: str, message: Any, expected: str, key: str = "") -> Attempt:
    return Attempt(f"admin: {what}", lambda scene: scene.admin(method, message, key), expected)


def load_by_endpoint(scene: Scene) -> str:
    def call(channel: grpc.Channel, metadata: Any) -> object:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        request = oip.RepositoryModelLoadRequest(model_name=MODEL)
        return stub.RepositoryModelLoad(request, metadata=metadata, timeout=20)

    return scene.endpoint(scene.cluster.grpc, call, "one")


DRAIN = admin_pb2.DrainAgentRequest(agent_id="agent-0")
CODE_IN_PLAN = "!!python/object/apply:os.system ['true']"
GRPC = [
    endpoint("no key", "UNAUTHENTICATED"),
    endpoint("a key nobody knows", "UNAUTHENTICATED", "ctn_no"),
    endpoint("another model", "PERMISSION_DENIED", "one", model=CHAT),
    endpoint("a path as model", "NOT_FOUND", "root", model="../../etc/passwd"),
    endpoint("a message that is too large", "RESOURCE_EXHAUSTED", "root", nbytes=LIMIT_BYTES * 2),
    endpoint("metadata that are too large", "RESOURCE_EXHAUSTED", "root", extra=20_000),
    endpoint("metadata that end the connection", "UNAVAILABLE", "root", extra=200_000),
    Attempt("grpc: to load a model with a key that infers", load_by_endpoint, "PERMISSION_DENIED"),
    operate("status without a key", "GetStatus", admin_pb2.GetStatusRequest(), "UNAUTHENTICATED"),
    operate(
        "status with a key that infers",
        "GetStatus",
        admin_pb2.GetStatusRequest(),
        "PERMISSION_DENIED",
        "one",
    ),
    operate("to drain with a key that infers", "DrainAgent", DRAIN, "PERMISSION_DENIED", "one"),
    operate("to drain with a key that looks", "DrainAgent", DRAIN, "PERMISSION_DENIED", "viewer"),
    operate(
        "to plan with a key that looks",
        "Replan",
        admin_pb2.ReplanRequest(),
        "PERMISSION_DENIED",
        "viewer",
    ),
    operate(
        "a plan that is code",
        "ApplyPlan",
        admin_pb2.ApplyPlanRequest(plan_json=CODE_IN_PLAN),
        "INVALID_ARGUMENT",
        "operator",
    ),
    operate(
        "to deploy a path",
        "DeployModel",
        admin_pb2.DeployModelRequest(model="../../etc"),
        "INVALID_ARGUMENT",
        "operator",
    ),
]


def status_call(channel: grpc.Channel, metadata: Any) -> object:
    return admin_pb2_grpc.AdminStub(channel).GetStatus(
        admin_pb2.GetStatusRequest(), metadata=metadata, timeout=10
    )


def drain_call(channel: grpc.Channel, metadata: Any) -> object:
    return admin_pb2_grpc.AdminStub(channel).DrainAgent(DRAIN, metadata=metadata, timeout=10)


def unknown_call(channel: grpc.Channel, metadata: Any) -> object:
    rpc = channel.unary_unary("/catenary.v1.Admin/DeleteEverything")
    return rpc(b"", metadata=metadata, timeout=10)


def gateway_hello(name: str) -> scheduler_pb2.GatewayMessages:
    peer = common_pb2.Peer(peer_id=name)
    hello = scheduler_pb2.GatewayHello(gateway_id=name, incarnation=1, peer=peer)
    return scheduler_pb2.GatewayMessages(messages=[scheduler_pb2.GatewayMessage(hello=hello)])


def agent_hello(name: str) -> scheduler_pb2.AgentMessages:
    peer = common_pb2.Peer(peer_id=name)
    hello = scheduler_pb2.AgentHello(
        agent_id=name, incarnation=1, peer=peer, server_id=name, link_bytes_per_second=10**9
    )
    return scheduler_pb2.AgentMessages(messages=[scheduler_pb2.AgentMessage(hello=hello)])


def at_scheduler(
    what: str, who: str, expected: str, call: Any = status_call, **how: Any
) -> Attempt:
    return Attempt(f"scheduler: {what}", lambda scene: scene.scheduler(who, call, **how), expected)


def session(
    what: str,
    who: str,
    role: Role,
    hello: Any,
    expected: str = "PERMISSION_DENIED",
    **how: Any,
) -> Attempt:
    return Attempt(
        f"scheduler: {what}", lambda scene: scene.session(who, role, hello, **how), expected
    )


def frames(what: str, who: str, **how: Any) -> Attempt:
    return Attempt(f"frames: {what}", lambda scene: scene.frames(who, "agent-0", **how), "closed")


INSIDE = [
    at_scheduler("without TLS", "", "UNAVAILABLE", plain=True),
    at_scheduler("without a certificate", "", "UNAVAILABLE"),
    at_scheduler("an operator of strangers", "operator:eve", "UNAVAILABLE", of="strangers"),
    at_scheduler(
        "an operator of another cluster", "operator:eve", "PERMISSION_DENIED", of="other cluster"
    ),
    at_scheduler("status, as an agent", "agent:agent-0", "PERMISSION_DENIED"),
    at_scheduler("status, as a scheduler", "scheduler:scheduler-9", "PERMISSION_DENIED"),
    at_scheduler("to drain, as a gateway", "gateway:gateway-0", "PERMISSION_DENIED", drain_call),
    at_scheduler(
        "to drain, as a gateway with a key that infers",
        "gateway:gateway-0",
        "PERMISSION_DENIED",
        drain_call,
        key="one",
    ),
    at_scheduler(
        "to drain, as an agent with an operator's key",
        "agent:agent-0",
        "PERMISSION_DENIED",
        drain_call,
        key="operator",
    ),
    at_scheduler("a method without a rule", "operator:eve", "UNIMPLEMENTED", unknown_call),
    session(
        "a gateway's session, as an agent",
        "agent:agent-0",
        Role.GATEWAY,
        gateway_hello("agent-0"),
    ),
    session(
        "a gateway's session, as an operator",
        "operator:eve",
        Role.GATEWAY,
        gateway_hello("eve"),
    ),
    session(
        "an agent's session, as a gateway",
        "gateway:gateway-0",
        Role.AGENT,
        agent_hello("gateway-0"),
    ),
    session("to be another gateway", "gateway:gateway-9", Role.GATEWAY, gateway_hello("gateway-0")),
    session("to be another agent", "agent:agent-9", Role.AGENT, agent_hello("agent-0")),
    session(
        "an agent of another cluster",
        "agent:agent-9",
        Role.AGENT,
        agent_hello("agent-9"),
        of="other cluster",
    ),
    session(
        "an agent of strangers",
        "agent:agent-9",
        Role.AGENT,
        agent_hello("agent-9"),
        of="strangers",
        expected="UNAVAILABLE",
    ),
    frames("as a stranger", "agent:agent-1", of="strangers"),
    frames("as an agent of another cluster", "agent:agent-1", of="other cluster"),
    frames("as an operator", "operator:eve"),
    frames("as a scheduler", "scheduler:scheduler-0"),
    frames("under another's name", "agent:agent-9", claim="agent-1"),
    frames("by an agent nobody planned with", "agent:agent-9"),
]


def model_folder(scene: Scene, name: str, manifest: str) -> Path:
    folder = scene.folder / "models" / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(manifest)
    return folder


def prepare(scene: Scene, name: str, manifest: str, content: bytes | None = None) -> str:
    folder = model_folder(scene, name, manifest)
    if content is not None:
        (folder / "model").write_bytes(content)
    return command("prepare", name, "--model-repository", str(scene.folder / "models"))


def pickled(scene: Scene) -> str:
    """A checkpoint whose reading would run a command, in the place of a program."""

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return (scene.folder / "was-run").touch, ()

    folder = model_folder(scene, "pickled", "platform: pytorch_exported\nfile: model\n")
    torch.save(Runs(), folder / "model")
    outcome = command("prepare", "pickled", "--model-repository", str(scene.folder / "models"))
    return "it ran" if (scene.folder / "was-run").exists() else outcome


def configured(scene: Scene) -> str:
    marker = scene.folder / "was-run-too"
    file = scene.folder / "catenary.yaml"
    file.write_text(f"agent: !!python/object/apply:pathlib.Path.touch [{marker}]\n")
    outcome = command("--config", str(file), "agent", "--insecure")
    return "it ran" if marker.exists() else outcome


def imported(scene: Scene) -> str:
    file = scene.folder / "model.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16)
    models = str(scene.folder / "models")
    return command("import-model", str(file), "--name", "broken", "--model-repository", models)


ONNX = "platform: onnxruntime_onnx\nfile: {}\n"
FILES = [
    Attempt(
        "file: a manifest that is code",
        lambda scene: prepare(
            scene, "code", "platform: !!python/object/apply:os.system ['true']\n"
        ),
        "exit 1",
    ),
    Attempt(
        "file: a model outside the repository",
        lambda scene: prepare(scene, "outside", ONNX.format("../../../secret")),
        "exit 1",
    ),
    Attempt(
        "file: an absolute path",
        lambda scene: prepare(scene, "absolute", ONNX.format("/etc/passwd")),
        "exit 1",
    ),
    Attempt(
        "file: garbage as ONNX",
        lambda scene: prepare(scene, "garbage", ONNX.format("model"), b"\xff" * 1000),
        "exit 1",
    ),
    Attempt("file: a pickle as program", pickled, "exit 1"),
    Attempt("file: settings that are code", configured, "exit 1"),
    Attempt("file: a GGUF file that lies about its sizes", imported, "exit 1"),
    Attempt(
        "file: a name that is a path",
        lambda scene: command(
            "prepare", "../../etc", "--model-repository", str(scene.folder / "models")
        ),
        "exit 1",
    ),
]

SECRET = "a-password-of-enough-length"


def redis(what: str, user: str, *words: str) -> Attempt:
    async def ask(scene: Scene) -> str:
        users = scene.folder / "users.acl"
        users.write_text(acl_file("main", dict.fromkeys((SCHEDULER, VIEW, HEALTH), SECRET)))
        folder = Path(tempfile.mkdtemp(dir=scene.folder))
        server = RedisServer(folder, [f'aclfile "{users}"'])
        await server.start(answering=False)
        password = f"{user}:{SECRET}@" if user else ""
        client = connect(server.url.replace("redis://", f"redis://{password}"), retries=10)
        try:
            await client.execute_command(*words)
        except RedisError as error:
            text = str(error).lower()
            known = ("no permissions", "authenticated", "noperm", "noauth")
            return "refused" if any(word in text for word in known) else text
        finally:
            await client.aclose()
            server.end()
        return "OK"

    return Attempt(f"redis: {what}", lambda scene: asyncio.run(ask(scene)), "refused")


REDIS = [
    redis("nobody asks", "", "GET", "catenary:{main}:lease"),
    redis("who may look writes", VIEW, "SET", "catenary:{main}:lease", "x"),
    redis("who may ping reads", HEALTH, "GET", "catenary:{main}:lease"),
    redis("the scheduler reads another cluster", SCHEDULER, "GET", "catenary:{other}:lease"),
    redis("the scheduler empties the server", SCHEDULER, "FLUSHALL"),
    redis("the scheduler configures the server", SCHEDULER, "CONFIG", "SET", "dir", "/tmp"),
]
TABLE = [*HTTP, *GRPC, *INSIDE, *FILES, *REDIS]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, data_dir = tmp_path_factory.mktemp("attempts"), tmp_path_factory.mktemp("refusals")
    install_images(data_dir / "models")
    install(data_dir / "models")
    keys_file = data_dir / "keys.json"
    keys = make_keys(keys_file, CALLERS)
    config: dict[str, Any] = {
        "gateway": {
            "api_keys_file": str(keys_file),
            "max_request_bytes": LIMIT_BYTES,
            "transports": ["tcp"],
        },
        "scheduler": {"api_keys_file": str(keys_file)},
        "agent": {"transports": ["tcp"]},
    }
    with running_cluster(
        data_dir, models=(MODEL, CHAT), agents=2, config=config, tls=True
    ) as cluster:
        yield Scene(cluster, keys, keys_file, folder)


@pytest.mark.parametrize("attempt", TABLE, ids=lambda attempt: attempt.what)
def test_is_refused(scene: Scene, attempt: Attempt) -> None:
    assert attempt.run(scene) == attempt.expected


def test_the_cluster_serves_as_before(scene: Scene) -> None:
    assert len(TABLE) >= 40
    assert len({attempt.what for attempt in TABLE}) == len(TABLE)
    figures.report("refusals", "attempts in the table", len(TABLE), "", ">= 40")
    with catenary.Client(scene.cluster.grpc, api_key=scene.keys["root"], timeout_s=60) as client:
        assert client.generate(CHAT, "Hi", max_tokens=4, temperature=0.0).text
    assert scene.http("/dashboard/v1/status", key="viewer") == "200"
    assert scene.admin("GetStatus", admin_pb2.GetStatusRequest(), "viewer") == "OK"
    pids = scene.cluster.facts["pids"]
    log = (scene.cluster.data_dir / "up.log").read_text()
    assert "child_ended" not in log, f"{pids}: {log[-2000:]}"


def test_who_may_is_let_in_the_same_ways(scene: Scene) -> None:
    """Otherwise the rows above would say nothing."""
    assert scene.frames("agent:agent-1", "agent-0") == "open"
    assert scene.scheduler("operator:eve", status_call) == "OK"
    assert scene.scheduler("gateway:gateway-0", status_call) == "OK"
    # Let in, and then: there is no such agent.
    nobody = admin_pb2.DrainAgentRequest(agent_id="agent-99")
    assert scene.admin("DrainAgent", nobody, "operator") == "INVALID_ARGUMENT"
    assert scene.http(COMPLETIONS, key="root", body=chat()) == "200"
