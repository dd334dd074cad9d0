"""Malformed requests over both endpoints: the right status, the field named, and service goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from gateway_harness import Stage, stage

CODE = grpc.StatusCode
BAD = CODE.INVALID_ARGUMENT
ROW = np.arange(4, dtype=np.float32)
Edit = Callable[[oip.ModelInferRequest], object]


def toy() -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="toy", id="x")
    request.inputs.add(name="in_0", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(ROW.tobytes())
    return request


def typed(model: str, datatype: str, shape: list[int], **contents: object) -> Edit:
    def edit(request: oip.ModelInferRequest) -> None:
        request.model_name = model
        del request.raw_input_contents[:], request.inputs[:]
        tensor = request.inputs.add(name="in_0", datatype=datatype, shape=shape)
        for name, values in contents.items():
            getattr(tensor.contents, name).extend(values)

    return edit


def shape(*sizes: int) -> Edit:
    return lambda request: request.inputs[0].shape.__setitem__(slice(None), sizes)


def raw(data: bytes) -> Edit:
    return lambda request: request.raw_input_contents.__setitem__(0, data)


def pair(first_rows: int, second_rows: int) -> Edit:
    def edit(request: oip.ModelInferRequest) -> None:
        request.model_name = "pair"
        del request.inputs[:], request.raw_input_contents[:]
        request.inputs.add(name="in_0", datatype="FP32", shape=[first_rows, 2])
        request.inputs.add(name="in_1", datatype="INT64", shape=[second_rows])
        request.raw_input_contents.extend([bytes(8 * first_rows), bytes(8 * second_rows)])

    return edit


def parameter(name: str, kind: str, value: object) -> Edit:
    return lambda request: setattr(request.parameters[name], kind, value)


GRPC_TABLE: list[tuple[str, Edit, grpc.StatusCode, str]] = [
    ("unknown model", lambda r: setattr(r, "model_name", "nope"), CODE.NOT_FOUND, ""),
    ("unknown version", lambda r: setattr(r, "model_version", "9"), CODE.NOT_FOUND, ""),
    ("not ready", lambda r: setattr(r, "model_name", "cold"), CODE.FAILED_PRECONDITION, ""),
    ("no inputs", lambda r: r.ClearField("inputs"), BAD, "inputs"),
    ("unknown input", lambda r: setattr(r.inputs[0], "name", "q" * 9999), BAD, "inputs[0].name"),
    ("twice", lambda r: r.inputs.append(r.inputs[0]), BAD, "inputs[1].name"),
    ("missing", lambda r: setattr(r, "model_name", "pair"), BAD, "inputs[0].shape"),
    ("datatype", lambda r: setattr(r.inputs[0], "datatype", "FP64"), BAD, "inputs[0].datatype"),
    ("no datatype", lambda r: setattr(r.inputs[0], "datatype", "X"), BAD, "inputs[0].datatype"),
    ("rank", shape(1, 4, 1), BAD, "inputs[0].shape"),
    ("no shape", shape(), BAD, "inputs[0].shape"),
    ("other size", shape(1, 5), BAD, "inputs[0].shape"),
    ("negative", shape(-1, 4), BAD, "inputs[0].shape"),
    ("no rows", shape(0, 4), BAD, "inputs[0].shape"),
    ("overflow", shape(2**62, 4), BAD, "inputs[0].shape"),
    ("huge", shape(2**40, 4), BAD, "inputs[0].shape"),
    ("two rows declared", shape(2, 4), BAD, "raw_input_contents[0]"),
    ("short", raw(b"abc"), BAD, "raw_input_contents[0]"),
    ("long", raw(bytes(32)), BAD, "raw_input_contents[0]"),
    ("empty", raw(b""), BAD, "raw_input_contents[0]"),
    ("surplus raw", lambda r: r.raw_input_contents.append(b"a"), BAD, "raw_input_contents"),
    ("mixed", lambda r: r.inputs[0].contents.fp32_contents.append(1), BAD, "inputs[0].contents"),
    ("no data", lambda r: r.ClearField("raw_input_contents"), BAD, "inputs[0].contents"),
    ("wrong list", typed("toy", "FP32", [1, 4], fp64_contents=[1] * 4), BAD, "inputs[0].contents"),
    (
        "two lists",
        typed("toy", "FP32", [1, 4], fp32_contents=[1] * 4, int_contents=[1]),
        BAD,
        "inputs[0].contents",
    ),
    ("few typed", typed("toy", "FP32", [1, 4], fp32_contents=[1] * 3), BAD, "inputs[0].contents"),
    ("many typed", typed("toy", "FP32", [1, 4], fp32_contents=[1] * 5), BAD, "inputs[0].contents"),
    ("typed half", typed("half", "FP16", [1, 2], fp32_contents=[1, 2]), BAD, "inputs[0].contents"),
    ("few bytes", typed("text", "BYTES", [1, 2], bytes_contents=[b"a"]), BAD, "inputs[0].contents"),
    ("rows differ", pair(2, 3), BAD, "inputs[1].shape"),
    ("output", lambda r: r.outputs.add(name="out_9"), BAD, "outputs[0].name"),
    ("output twice", lambda r: [r.outputs.add(name="out_0") for _ in "ab"], BAD, "outputs[1].name"),
    ("slo 0", parameter("slo_ms", "int64_param", 0), BAD, 'parameters["slo_ms"]'),
    ("slo text", parameter("slo_ms", "string_param", "1"), BAD, 'parameters["slo_ms"]'),
    ("slo inf", parameter("slo_ms", "double_param", float("inf")), BAD, 'parameters["slo_ms"]'),
    ("priority", parameter("priority", "string_param", "a"), BAD, 'parameters["priority"]'),
    ("deadline", parameter("deadline_unix_ms", "int64_param", 1), CODE.DEADLINE_EXCEEDED, ""),
    (
        "too large",
        lambda r: r.parameters["pad"].__setattr__("string_param", "x" * 70_000),
        CODE.RESOURCE_EXHAUSTED,
        "",
    ),
]


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path, max_request_bytes=65_536) as started:
        yield started


async def infer(stub: oip_grpc.GRPCInferenceServiceStub, edit: Edit) -> oip.ModelInferResponse:
    request = toy()
    edit(request)
    return await stub.ModelInfer(request, timeout=5)


def violation(error: grpc.aio.AioRpcError) -> str:
    """The field named in `google.rpc.BadRequest`."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                bad = error_details_pb2.BadRequest()
                if packed.Unpack(bad):
                    return bad.field_violations[0].field
    return ""


async def test_grpc_endpoint_refuses_by_field(small: Stage) -> None:
    wrong: list[str] = []
    async with grpc.aio.insecure_channel(small.grpc) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        for name, edit, code, field in GRPC_TABLE:
            try:
                await infer(stub, edit)
                wrong.append(f"{name}: was accepted")
            except grpc.aio.AioRpcError as error:
                if error.code() != code or violation(error) != field:
                    wrong.append(f"{name}: {error.code()} {violation(error)!r} {error.details()}")
            answer = await infer(stub, lambda request: None)
            assert answer.raw_output_contents[0] == ROW.tobytes(), f"broken after {name}"
    assert not wrong, "\n".join(wrong)


def tensor(**changes: object) -> dict[str, object]:
    return {"name": "in_0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4.5], **changes}


def inputs(*tensors: object, **more: object) -> dict[str, object]:
    return {"inputs": list(tensors) or [tensor()], **more}


NO_DATA = {key: value for key, value in tensor().items() if key != "data"}
DEEP = b"[" * 100_000
HTTP_TABLE: list[tuple[str, str, object, int, str]] = [
    ("not json", "toy", b"{", 400, "body"),
    ("not utf-8", "toy", b"\xff\xfe\xfd", 400, "body"),
    ("deep", "toy", DEEP[:60_000], 400, "body"),
    ("a list", "toy", [], 400, "body"),
    ("no inputs", "toy", {}, 400, "inputs"),
    ("inputs text", "toy", {"inputs": "x"}, 400, "inputs"),
    ("input text", "toy", {"inputs": ["x"]}, 400, "inputs[0]"),
    ("no name", "toy", inputs({**tensor(), "name": None}), 400, "inputs[0].name"),
    ("unknown name", "toy", inputs(tensor(name="who")), 400, "inputs[0].name"),
    ("name a number", "toy", inputs(tensor(name=3)), 400, "inputs[0].name"),
    ("shape text", "toy", inputs(tensor(shape="big")), 400, "inputs[0].shape"),
    ("shape float", "toy", inputs(tensor(shape=[1.0, 4])), 400, "inputs[0].shape"),
    ("shape bool", "toy", inputs(tensor(shape=[True, 4])), 400, "inputs[0].shape"),
    ("shape negative", "toy", inputs(tensor(shape=[-1, 4])), 400, "inputs[0].shape"),
    ("shape huge", "toy", inputs(tensor(shape=[10**30, 4])), 400, "inputs[0].shape"),
    ("datatype", "toy", inputs(tensor(datatype="INT8")), 400, "inputs[0].datatype"),
    ("no data", "toy", inputs(NO_DATA), 400, "inputs[0].data"),
    ("data a number", "toy", inputs(tensor(data=1)), 400, "inputs[0].data"),
    ("data text", "toy", inputs(tensor(data=list("abcd"))), 400, "inputs[0].data"),
    ("data null", "toy", inputs(tensor(data=[None] * 4)), 400, "inputs[0].data"),
    ("data bools", "toy", inputs(tensor(data=[True] * 4)), 400, "inputs[0].data"),
    ("ragged", "toy", inputs(tensor(data=[[1], [2, 3, 4]])), 400, "inputs[0].data"),
    ("few", "toy", inputs(tensor(data=[1, 2, 3])), 400, "inputs[0].data"),
    ("shaped otherwise", "toy", inputs(tensor(data=[[1], [2], [3], [4]])), 400, "inputs[0].data"),
    (
        "binary lies",
        "toy",
        inputs({**NO_DATA, "parameters": {"binary_data_size": 16}}),
        400,
        'inputs[0].parameters["binary_data_size"]',
    ),
    (
        "binary negative",
        "toy",
        inputs({**NO_DATA, "parameters": {"binary_data_size": -1}}),
        400,
        'inputs[0].parameters["binary_data_size"]',
    ),
    ("both", "toy", inputs(tensor(parameters={"binary_data_size": 0})), 400, "inputs[0].data"),
    ("parameters", "toy", inputs(tensor(parameters=[])), 400, "inputs[0].parameters"),
    (
        "range",
        "flags",
        inputs(
            tensor(datatype="BOOL", shape=[1], data=[True]),
            tensor(name="in_1", datatype="UINT8", shape=[1], data=[256]),
        ),
        400,
        "inputs[1].data",
    ),
    (
        "fraction",
        "flags",
        inputs(
            tensor(datatype="BOOL", shape=[1], data=[True]),
            tensor(name="in_1", datatype="UINT8", shape=[1], data=[1.5]),
        ),
        400,
        "inputs[1].data",
    ),
    (
        "bool as number",
        "flags",
        inputs(
            tensor(datatype="BOOL", shape=[1], data=[1]),
            tensor(name="in_1", datatype="UINT8", shape=[1], data=[1]),
        ),
        400,
        "inputs[0].data",
    ),
    ("half as json", "half", inputs(tensor(datatype="FP16", shape=[1, 2])), 400, "inputs[0].data"),
    (
        "text numbers",
        "text",
        inputs(tensor(datatype="BYTES", shape=[1, 2], data=[1, 2])),
        400,
        "inputs[0].data",
    ),
    (
        "surrogate",
        "text",
        b'{"inputs":[{"name":"in_0","datatype":"BYTES","shape":[1,2],"data":["\\ud800","a"]}]}',
        400,
        "body",
    ),
    ("output", "toy", inputs(outputs=[{"name": "x"}]), 400, "outputs[0].name"),
    ("outputs text", "toy", inputs(outputs="out_0"), 400, "outputs"),
    ("slo", "toy", inputs(parameters={"slo_ms": -1}), 400, 'parameters["slo_ms"]'),
    (
        "binary output",
        "toy",
        inputs(parameters={"binary_data_output": 1}),
        400,
        'parameters["binary_data_output"]',
    ),
    ("id", "toy", inputs(id=7), 400, "id"),
    ("unknown model", "nope", inputs(), 404, ""),
    ("not ready", "cold", inputs(), 503, ""),
    ("too large", "toy", b" " * 70_000, 413, ""),
]


async def test_http_endpoint_refuses_by_field(small: Stage) -> None:
    wrong: list[str] = []
    async with aiohttp.ClientSession(f"http://{small.http}") as session:
        for name, model, body, status, field in HTTP_TABLE:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(f"/v2/models/{model}/infer", data=data) as answer:
                text = (await answer.json())["error"]
                if answer.status != status or not text.startswith(f"{field}: " if field else ""):
                    wrong.append(f"{name}: {answer.status} {text}")
            async with session.post("/v2/models/toy/infer", json=inputs()) as answer:
                assert (await answer.json())["outputs"][0]["data"] == [1, 2, 3, 4.5], name
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        ({"Inference-Header-Content-Length": "99999"}, b"{}", 400, "Inference-Header"),
        ({"Inference-Header-Content-Length": "-1"}, b"{}", 400, "Inference-Header"),
        ({"Inference-Header-Content-Length": "²"}, b"{}", 400, "Inference-Header"),
        ({"Inference-Header-Content-Length": "2"}, b"{}abc", 400, "inputs"),
        ({"Content-Encoding": "gzip"}, b"this is not gzip at all", 400, ""),
        ({"Content-Encoding": "deflate"}, b"\xff\xff\xff\xff\xff\xff", 400, ""),
    ],
)
async def test_http_endpoint_refuses_lying_headers(
    small: Stage, headers: dict[str, str], body: bytes, status: int, says: str
) -> None:
    async with aiohttp.ClientSession(f"http://{small.http}") as session:
        async with session.post("/v2/models/toy/infer", data=body, headers=headers) as answer:
            assert answer.status == status
            assert says in await answer.text()
        async with session.post("/v2/models/toy/infer", json=inputs()) as answer:
            assert answer.status == 200


async def test_compressed_bomb_is_refused(small: Stage) -> None:
    import gzip

    bomb = gzip.compress(bytes(30 << 20))
    async with aiohttp.ClientSession(f"http://{small.http}") as session:
        headers = {"Content-Encoding": "gzip"}
        async with session.post("/v2/models/toy/infer", data=bomb, headers=headers) as answer:
            assert answer.status == 413
    assert small.gateway._capacity.bytes == 0


async def test_unknown_paths_and_openai_errors(small: Stage) -> None:
    async with aiohttp.ClientSession(f"http://{small.http}") as session:
        async with session.get("/v2/nothing/here") as answer:
            assert (answer.status, "error" in await answer.json()) == (404, True)
        async with session.get("/v2/models/toy/infer") as answer:
            assert answer.status == 405
        async with session.get("/v1/models") as answer:
            assert (await answer.json())["data"] == []
        for method, path, status in [
            ("GET", "/v1/models/gpt", 404),
            ("POST", "/v1/chat/completions", 400),
            ("POST", "/v1/completions", 400),
            ("GET", "/v1/what", 404),
        ]:
            async with session.request(method, path, json={}) as answer:
                assert answer.status == status
                assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
