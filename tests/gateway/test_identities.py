"""Who a gateway believes, how its endpoints are protected, and whose proof it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from catenary_gateway.endpoints.security import endpoint_security
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, frame_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.errors import InvalidInput
from catenary_services.grpc.grpc_kit import open_channel
from catenary_services.security.keys import add_key
from catenary_services.security.tls import ClientSecurity
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSettings
from gateway_harness import GATEWAY, Stage, stage
from shared_helpers.waiting import until
from tests.support.certificates import Certificates

VALUES = np.arange(4, dtype=np.float32)


async def infer(running: Stage) -> list[float]:
    tensor = oip.ModelInferRequest.InferInputTensor(name="in_0", datatype="FP32", shape=[1, 4])
    request = oip.ModelInferRequest(
        model_name="toy", inputs=[tensor], raw_input_contents=[VALUES.tobytes()]
    )
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(request, timeout=10)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()


@asynccontextmanager
async def impostor(running: Stage, tmp_path: Path) -> AsyncIterator[TransportHub]:
    """A peer that knows the gateway, and that nothing was ordered from."""
    hub = TransportHub("agent-x", TransportSettings(runtime_dir=tmp_path / "run"))
    await hub.start(lambda frame: frame.release())
    hub._peers = running.agent.hub._peers
    try:
        yield hub
    finally:
        await hub.close()


@pytest.mark.parametrize(
    "kind", [frame_pb2.FRAME_KIND_RESULT, frame_pb2.FRAME_KIND_FAILURE], ids=["result", "failure"]
)
async def test_results_come_from_the_agent_they_were_ordered_from(
    tmp_path: Path, kind: frame_pb2.FrameKind.ValueType
) -> None:
    async with stage(tmp_path) as running, impostor(running, tmp_path) as stranger:
        running.agent.hold = True
        answer = asyncio.create_task(infer(running))
        await asyncio.wait_for(running.agent.arrived.wait(), 30)
        [(header, payload)] = running.agent.held
        forged = frame_pb2.FrameHeader()
        forged.CopyFrom(header)
        forged.kind = kind
        for tensor in forged.tensors:
            tensor.name = tensor.name.replace("in_", "out_")
        link = await stranger.link_to(GATEWAY, 5)
        slot = await link.export(len(payload), 5)
        slot.view[:] = bytes(len(payload))
        await link.push(slot, forged.SerializeToString(), 5)
        results = running.gateway._plane.results
        async with asyncio.timeout(30):
            while results.refused == 0:
                await asyncio.sleep(0.005)
        running.agent.answer(header, payload)
        assert await answer == VALUES.tolist()
        count = running.gateway._metrics.registry.get_sample_value
        labels = {"reason": "unplanned_sender"}
        assert count("catenary_frames_refused_total", labels) == 1


# ---- endpoints ----


async def live(target: str, security: ClientSecurity) -> bool:
    async with open_channel(target, security) as channel:
        stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
        try:
            return bool((await stub.ServerLive(oip.ServerLiveRequest(), timeout=5)).live)
        except grpc.aio.AioRpcError:
            return False


def inside(certificates: Certificates) -> dict[str, Any]:
    return {**certificates.settings("gateway", GATEWAY), "transports": ["tcp"]}


async def test_endpoints_may_go_without_tls_while_the_inside_has_it(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    plain, trusting = ClientSecurity(insecure=True), ClientSecurity(ca_file=certificates.ca_file)
    async with stage(
        tmp_path, wait=False, **inside(certificates), endpoints_insecure=True
    ) as running:
        assert await live(running.grpc, plain)
        assert not await live(running.grpc, trusting)
    async with stage(tmp_path, wait=False, **inside(certificates)) as running:
        assert not await live(running.grpc, plain)
        assert await live(running.grpc, trusting)


async def test_endpoints_may_show_another_certificate_than_the_inside(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    public = Certificates(tmp_path / "public", "public")
    endpoint = public.files("gateway", "endpoint")
    files = {"endpoint_cert_file": endpoint["cert_file"], "endpoint_key_file": endpoint["key_file"]}
    async with stage(tmp_path, wait=False, **inside(certificates), **files) as running:
        assert await live(running.grpc, ClientSecurity(ca_file=public.ca_file))
        assert not await live(running.grpc, ClientSecurity(ca_file=certificates.ca_file))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"endpoint_cert_file": Path("x")}, "endpoint_key_file"),
        ({"endpoint_cert_file": Path("x"), "endpoints_insecure": True}, "endpoints_insecure"),
    ],
)
def test_endpoints_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    own = Certificates(tmp_path / "certs").settings("gateway", "g")
    settings = GatewaySettings(gateway_id="g", **own, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput) as caught:
        endpoint_security(settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("operator", "UNAVAILABLE"),  # let in: there is no scheduler to ask
        ("agent", "PERMISSION_DENIED"),
        ("gateway", "PERMISSION_DENIED"),
        ("redis", "PERMISSION_DENIED"),
    ],
)
async def test_without_keys_the_admin_port_is_for_operators_certificates(
    tmp_path: Path, role: str, expected: str
) -> None:
    certificates = Certificates(tmp_path / "certs")
    async with stage(tmp_path, wait=False, **inside(certificates)) as running:
        security = certificates.client(role, "someone")
        async with open_channel(running.admin, security) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id="a"), timeout=5)
    assert caught.value.code().name == expected


# ---- on behalf of an operator ----


async def test_the_operators_key_goes_with_what_is_forwarded(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "operator", ["admin"])
    metadata = (("authorization", f"Bearer {key}"),)
    async with stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running:
        async with grpc.aio.insecure_channel(running.admin) as channel:
            admin: Any = admin_pb2_grpc.AdminStub(channel)
            await admin.DeployModel(
                admin_pb2.DeployModelRequest(model="m"), metadata=metadata, timeout=5
            )
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            endpoint: Any = oip_grpc.GRPCInferenceServiceStub(channel)
            await endpoint.RepositoryModelLoad(
                oip.RepositoryModelLoadRequest(model_name="m"), metadata=metadata, timeout=5
            )
        assert running.scheduler.presented == [f"Bearer {key}"] * 2


async def test_an_import_is_for_operators_and_ends_with_its_caller(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "operator", ["admin"])
    viewer = add_key(tmp_path / "keys.json", "viewer", ["view"])
    async with (
        stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running,
        grpc.aio.insecure_channel(running.admin) as channel,
    ):
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.ImportModelRequest(source="hf:org/endless")
        refused = admin.ImportModel(request, metadata=(("authorization", f"Bearer {viewer}"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        call = admin.ImportModel(request, metadata=(("authorization", f"Bearer {key}"),))
        assert [(await call.read()).phase for _ in range(3)] == ["listed", "fetching", "fetching"]
        call.cancel()
        await until(lambda: "import ended" in running.scheduler.presented)
        assert running.scheduler.presented == [f"Bearer {key}", "import ended"]
