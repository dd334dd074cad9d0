"""Whatever extension parameters say, the answer is no failure of the gateway, and it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import grpc
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from gateway_harness import Stage, stage
from shared_helpers.triton_clients import shared_object

NAMES = (
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
    "classification",
    "binary_data",
    "binary_data_size",
    "binary_data_output",
    "priority",
    "timeout",
    "slo_ms",
    "deadline_unix_ms",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "triton_enable_empty_final_response",
)
TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["all", "nobody"]))
NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1])
)
FLOATS = st.floats()
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.integers(), FLOATS, TEXTS)
VALUES = st.one_of(LEAVES, st.lists(LEAVES, max_size=2), st.dictionaries(TEXTS, LEAVES, max_size=2))
MANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, object]:
    found = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
    if draw(st.booleans()):
        found["shared_memory_region"] = draw(TEXTS)
        found["shared_memory_byte_size"] = draw(st.one_of(st.just(16), VALUES))
    return found


FINE = frozenset({200, 400, 403, 404, 409, 413, 429, 501, 503, 504})
"""What a malformed request may be answered with; 500 and a closed connection are our failures."""
ROUTES = [
    ("POST", "/v2/models/toy/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/toy/load"),
    ("POST", "/v2/repository/models/a%0Ab/unload"),
    ("POST", "/v2/repository/models/%ED%A0%80/load"),
    ("POST", "/v2/systemsharedmemory/region/all/register"),
    ("POST", "/v2/systemsharedmemory/region/%ED%A0%80%FF/register"),
    ("POST", "/v2/systemsharedmemory/region/%FF/unregister"),
    ("POST", "/v2/cudasharedmemory/region/all/register"),
    ("GET", "/v2/systemsharedmemory/region/%FF/status"),
    ("GET", "/v2/cudasharedmemory/region/%FF/status"),
    ("GET", "/v2/models/%FF/config"),
    ("GET", "/v2/models/%ED%A0%80/stats"),
    ("GET", "/v2/models/toy/versions/%FF/stats"),
]
FIELDS = st.sampled_from(
    [
        "key",
        "offset",
        "byte_size",
        "parameters",
        "config",
        "unload_dependents",
        "ready",
        "raw_handle",
        "trace_level",
        "trace_rate",
        "trace_file",
        "log_info",
        "log_verbose_level",
        "log_file",
        "x",
    ]
)


async def status_of(session: aiohttp.ClientSession, method: str, path: str, body: object) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.request(
        method, URL(path, encoded=True), data=data if method == "POST" else None
    ) as answer:
        await answer.read()
        return answer.status


async def test_http_inferences(tmp_path: Path, prefix: str) -> None:
    async with (
        stage(tmp_path, shared_memory_prefix=prefix) as place,
        aiohttp.ClientSession(f"http://{place.http}") as session,
    ):
        with shared_object(f"/{prefix}all", 64):
            registered = {"key": f"/{prefix}all", "byte_size": 64}
            path = "/v2/systemsharedmemory/region/all/register"
            assert await status_of(session, "POST", path, registered) == 200
            await many_http_inferences(session)
        assert place.gateway._capacity.bytes == 0


async def many_http_inferences(session: aiohttp.ClientSession) -> None:
    found: list[dict[str, object]] = []

    @MANY
    @given(parameters(), parameters(), parameters(), st.booleans())
    def collect(whole: object, given: object, wanted: object, has_data: bool) -> None:
        tensor = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "parameters": given}
        if has_data:
            tensor["data"] = [1, 2, 3, 4]
        output = {"name": "out_0", "parameters": wanted}
        found.append({"inputs": [tensor], "outputs": [output], "parameters": whole})

    collect()
    for body in found:
        status = await status_of(session, "POST", "/v2/models/toy/infer", body)
        assert status in FINE, body


async def test_grpc_inferences(tmp_path: Path, prefix: str) -> None:
    found: list[oip.ModelInferRequest] = []

    def put(values: dict[str, object], into: object) -> None:
        for name, value in values.items():
            kinds = {bool: "bool_param", str: "string_param", float: "double_param"}
            kind = kinds.get(type(value))
            parameter = into[name]  # type: ignore[index]
            if type(value) is int:
                kind = "int64_param" if value < 2**63 else "uint64_param"
                setattr(parameter, kind, max(-(2**63), min(value, 2**64 - 1)))
            elif kind is not None:
                setattr(parameter, kind, value)

    @MANY
    @given(parameters(), parameters(), parameters(), st.booleans())
    def collect(
        whole: dict[str, object],
        given: dict[str, object],
        wanted: dict[str, object],
        has_data: bool,
    ) -> None:
        request = oip.ModelInferRequest(model_name="toy")
        tensor = request.inputs.add(name="in_0", datatype="FP32", shape=[1, 4])
        put(whole, request.parameters)
        put(given, tensor.parameters)
        put(wanted, request.outputs.add(name="out_0").parameters)
        if has_data:
            request.raw_input_contents.append(np.ones(4, np.float32).tobytes())
        found.append(request)

    collect()
    async with (
        stage(tmp_path, shared_memory_prefix=prefix) as place,
        grpc.aio.insecure_channel(place.grpc) as channel,
    ):
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        with shared_object(f"/{prefix}all", 64):
            await stub.SystemSharedMemoryRegister(
                oip.SystemSharedMemoryRegisterRequest(name="all", key=f"/{prefix}all", byte_size=64)
            )
            codes = [await code_of(stub, request) for request in found]
        assert place.gateway._capacity.bytes == 0
    assert not {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN} & set(codes)


async def code_of(
    stub: oip_grpc.GRPCInferenceServiceStub, request: oip.ModelInferRequest
) -> grpc.StatusCode:
    try:
        await stub.ModelInfer(request, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_http_extensions(running: Stage, sharing: Stage) -> None:
    found: list[tuple[tuple[str, str], object]] = []

    @MANY
    @given(
        st.sampled_from(ROUTES),
        st.one_of(st.dictionaries(FIELDS, VALUES, max_size=3), VALUES, st.binary(max_size=9)),
    )
    def collect(route: tuple[str, str], body: object) -> None:
        found.append((route, body))

    collect()
    for place in (running, sharing):
        async with aiohttp.ClientSession(f"http://{place.http}") as session:
            for route, body in found:
                assert await status_of(session, *route, body) in FINE, (route, body)
            assert await status_of(session, "GET", "/v2/models/toy/ready", b"") == 200
