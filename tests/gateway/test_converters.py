"""What goes through a converter comes out as it was: typed, raw, JSON and binary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.admission.request_pipeline import Caller
from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.inference import ConversionContext, InferenceResponse, OutputFormat
from catenary_gateway.oip import oip_json, oip_proto
from catenary_gateway.oip.caller_memory import CallerMemory
from catenary_gateway.oip.shared_regions import SharedRegions
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import DeadlineExceeded, InvalidInput, NotSupported
from gateway_harness import echo

MEMORY = CallerMemory(SharedRegions(None, 1), Caller(Quotas(), "127.0.0.1", ""), 1 << 20)
"""Shared memory as it is without a setting: none."""
INTAKE = ConversionContext(1 << 20, now_unix_ns=10**18, default_id="made", memory=MEMORY)
FIXED = sorted(DTYPE_OF)
TYPED = [name for name in FIXED if name != "FP16"]


def model_of(datatype: str, rank: int) -> Model:
    catalog = Catalog()
    table = scheduler_pb2.ModelTable(models=[echo("m", (datatype, *([-1] * rank)))])
    catalog.update(table)
    return catalog.find("m", "")


@st.composite
def tensors(draw: st.DrawFn, datatypes: list[str]) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from([*datatypes, "BYTES"]))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    if datatype == "BYTES":
        count = int(np.prod(shape))
        words = draw(st.lists(st.text(max_size=9), min_size=count, max_size=count))
        array = np.empty(count, object)
        array[:] = [word.encode() for word in words]
        return datatype, array.reshape(shape)
    finite = {"allow_nan": False, "allow_infinity": False} if datatype.startswith("FP") else {}
    return datatype, draw(
        hnp.arrays(DTYPE_OF[datatype], shape, elements=hnp.from_dtype(DTYPE_OF[datatype], **finite))
    )


def as_request(response: oip.ModelInferResponse) -> oip.ModelInferRequest:
    """An answer has the same form as a question."""
    request = oip.ModelInferRequest(model_name="m", raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        tensor = request.inputs.add(name="in_0", datatype=output.datatype, shape=output.shape)
        if not response.raw_output_contents:
            tensor.contents.CopyFrom(output.contents)
    return request


def received(message: oip.ModelInferRequest) -> oip_proto.ReceivedRequest:
    return oip_proto.received_request(message.SerializeToString())


@settings(max_examples=150, deadline=None)
@given(tensor=tensors(FIXED), raw=st.booleans())
def test_grpc_round_trip(tensor: tuple[str, np.ndarray], raw: bool) -> None:
    datatype, array = tensor
    model = model_of(datatype, array.ndim)
    response = InferenceResponse(model, "id", (array,))
    message = oip_proto.response_of(response, OutputFormat(raw=raw), (0,), MEMORY)
    assert bool(message.raw_output_contents) == (raw or datatype == "FP16")
    wire = as_request(message).SerializeToString()
    request, form = oip_proto.request_of(oip_proto.received_request(wire), model, INTAKE)
    got = request.inputs["in_0"]
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype
    assert request.rows == array.shape[0]
    assert form.raw == bool(message.raw_output_contents)
    assert request.id == "made"


@pytest.mark.parametrize("request_id", ["id", "ä", "\udc80"])
@pytest.mark.parametrize("worst", [1.5, float("inf"), float("-inf"), float("nan")])
def test_http_answers_have_numbers_that_are_not_finite_and_any_id(
    request_id: str, worst: float
) -> None:
    values = np.array([[0.1, worst]], np.float32)
    response = InferenceResponse(model_of("FP32", 2), request_id, (values,))
    pieces, _ = oip_json.response_of(response, OutputFormat(binary=(False,)), (0,), MEMORY)
    document = json.loads(b"".join(pieces))
    assert document["id"] == request_id
    np.testing.assert_array_equal(document["outputs"][0]["data"], values[0])


@settings(max_examples=150, deadline=None)
@given(tensor=tensors(TYPED), binary=st.booleans(), nested=st.booleans())
def test_http_round_trip(tensor: tuple[str, np.ndarray], binary: bool, nested: bool) -> None:
    datatype, array = tensor
    model = model_of(datatype, array.ndim)
    response = InferenceResponse(model, "id", (array,))
    pieces, size = oip_json.response_of(response, OutputFormat(binary=(binary,)), (0,), MEMORY)
    body = b"".join(pieces)
    document = json.loads(body[:size])
    (output,) = document["outputs"]
    output["name"] = "in_0"
    if nested and not binary:
        output["data"] = np.array(output["data"], dtype=object).reshape(array.shape).tolist()
    header = json.dumps({"id": "you", "inputs": [output]}).encode()
    tail = b"" if size is None else body[size:]
    request, _ = oip_json.request_of(
        header + tail, None if size is None else len(header), model, INTAKE
    )
    np.testing.assert_array_equal(request.inputs["in_0"], array)
    assert request.inputs["in_0"].dtype == array.dtype
    assert request.id == "you"


@settings(max_examples=100, deadline=None)
@given(
    raw_bytes=st.lists(st.sampled_from([0, 1, 127, 128, 16_384, 70_000]), max_size=4),
    name=st.text(max_size=200),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    number=st.floats(allow_nan=False),
    at=st.floats(0, 1, exclude_max=True),
    change=st.none() | st.binary(max_size=12),
)
def test_large_raw_contents_are_viewed_as_protobuf_would_copy_them(
    raw_bytes: list[int],
    name: str,
    shape: list[int],
    number: float,
    at: float,
    change: bytes | None,
) -> None:
    message = oip.ModelInferRequest(model_name=name)
    message.raw_input_contents.extend(bytes([7]) * size for size in raw_bytes)
    message.inputs.add(name=name, shape=shape).contents.fp64_contents.append(number)
    message.parameters["p"].double_param = number
    data = bytearray(message.SerializeToString())
    if change is not None:
        place = int(len(data) * at)
        data[place : place + len(change)] = change
    try:
        expected = oip.ModelInferRequest.FromString(bytes(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            oip_proto.received_request(data)
        return
    got = oip_proto.received_request(data)
    assert [bytes(each) for each in got.raw] == list(expected.raw_input_contents)
    assert got.nbytes == len(data)
    for each in (expected, got.message):
        del each.raw_input_contents[:]
    assert got.message == expected


def test_contents_in_a_long_message_are_not_copied() -> None:
    data = bytearray(
        oip.ModelInferRequest(raw_input_contents=[b"1", bytes(20_000)]).SerializeToString()
    )
    received = oip_proto.received_request(data)
    data[-1] = 9
    assert received.raw[1][-1] == 9
    assert not received.message.raw_input_contents


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_or_understood_but_never_crashes(data: bytes) -> None:
    model = model_of("BYTES", 1)
    message = oip.ModelInferRequest(model_name="m", raw_input_contents=[data])
    message.inputs.add(name="in_0", datatype="BYTES", shape=[2])
    for call in (
        lambda: oip_proto.request_of(received(message), model, INTAKE),
        lambda: oip_json.request_of(data, None, model, INTAKE),
    ):
        try:
            call()
        except InvalidInput as error:
            assert error.field  # noqa: PT017 - both outcomes are fine


def parameters(**values: object) -> oip.ModelInferRequest:
    message = oip.ModelInferRequest(raw_input_contents=[b"\x01"])
    message.inputs.add(name="in_0", datatype="UINT8", shape=[1])
    for name, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(message.parameters[name], kind[type(value)], value)
    return message


@pytest.mark.parametrize(
    ("given_parameters", "slo_ns", "priority"),
    [
        ({}, None, 0),
        ({"slo_ms": 5}, 5_000_000, 0),
        ({"slo_ms": 0.5, "priority": -3}, 500_000, -3),
        ({"deadline_unix_ms": 10**12 + 7}, 7_000_000, 0),
        ({"deadline_unix_ms": 10**12 + 7, "slo_ms": 3}, 3_000_000, 0),
        ({"slo_ms": 1e300}, 3_600_000_000_000, 0),
        ({"unknown": "ignored"}, None, 0),
        ({"timeout": 1500}, 1_500_000, 0),
        ({"timeout": 1500, "slo_ms": 1}, 1_000_000, 0),
        ({"timeout": 0, "sequence_id": 0, "sequence_start": False, "sequence_end": False}, None, 0),
        ({"timeout": 2**62}, 3_600_000_000_000, 0),
    ],
)
def test_parameters(given_parameters: dict[str, object], slo_ns: int | None, priority: int) -> None:
    message = received(parameters(**given_parameters))
    request, _ = oip_proto.request_of(message, model_of("UINT8", 1), INTAKE)
    assert request.options.slo_ns == slo_ns
    assert request.options.priority == priority


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo_ms": 0},
        {"slo_ms": True},
        {"slo_ms": float("nan")},
        {"priority": 1.0},
        {"priority": 2**40},
        {"deadline_unix_ms": -1},
        {"deadline_unix_ms": "now"},
        {"timeout": -1},
        {"timeout": 0.0},
        {"timeout": False},
        {"timeout": "1"},
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as raised:
        oip_proto.request_of(received(parameters(**wrong)), model_of("UINT8", 1), INTAKE)
    assert raised.value.field == f'parameters["{next(iter(wrong))}"]'


@pytest.mark.parametrize(
    "of_a_sequence", [{"sequence_id": 7}, {"sequence_id": "a"}, {"sequence_start": True}]
)
def test_sequences_are_refused_by_name(of_a_sequence: dict[str, object]) -> None:
    (name,) = of_a_sequence
    with pytest.raises(NotSupported, match=name):
        oip_proto.request_of(received(parameters(**of_a_sequence)), model_of("UINT8", 1), INTAKE)


def test_passed_deadline_is_refused_at_once() -> None:
    with pytest.raises(DeadlineExceeded):
        oip_proto.request_of(received(parameters(deadline_unix_ms=1)), model_of("UINT8", 1), INTAKE)


def test_newest_ready_version_is_the_default() -> None:
    catalog = Catalog()
    table = scheduler_pb2.ModelTable(
        models=[
            echo("m", ("FP32", -1), version=version, ready=version != "10")
            for version in ("10", "2", "9", "beta")
        ]
    )
    catalog.update(table)
    assert catalog.find("m", "").key.version == "9"
    assert catalog.versions("m") == ["beta", "2", "9", "10"]
