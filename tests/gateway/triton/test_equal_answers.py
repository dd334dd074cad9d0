"""What gRPC and HTTP say of the same thing is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from gateway_harness import MODELS, Stage
from shared_helpers.triton_clients import FORMS, TritonClient, triton_client

X = np.array([[0.25, 3, -1, 3], [9, 9, 9, 9.5]], np.float32)


async def from_all(place: Stage, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What all forms of the client answer; those for gRPC within one more dictionary at most."""
    found: dict[str, Any] = {}
    for form in FORMS:
        async with triton_client(form, place.grpc, place.http) as client:
            found[form] = await client.call(method, *args, **kwargs)
    return found


def require_within(part: object, whole: object, at: str = "") -> None:
    """Checks that all that one answer has, the other has, too: tritonclient knows more fields."""
    if isinstance(part, dict):
        assert isinstance(whole, dict), at
        for name, value in part.items():
            require_within(value, whole[name], f"{at}.{name}")
    elif isinstance(part, list):
        assert isinstance(whole, list), at
        assert len(part) == len(whole), at
        for index, (each, other) in enumerate(zip(part, whole, strict=True)):
            require_within(each, other, f"{at}[{index}]")
    else:
        assert part == whole, at


@pytest.mark.parametrize("model", [model.name for model in MODELS])
async def test_configurations(sharing: Stage, model: str) -> None:
    found = await from_all(sharing, "get_model_config", model)
    for form in ("grpc", "grpc.aio"):
        require_within(found["http"], found[form]["config"])
    assert found["http"] == found["http.aio"]
    config, metadata = found["http"], (await from_all(sharing, "get_model_metadata", model))["http"]
    batch = [-1] if config["max_batch_size"] else []
    for told, tensors in (("input", "inputs"), ("output", "outputs")):
        assert [(each["name"], [*batch, *each["dims"]]) for each in config[told]] == [
            (each["name"], each["shape"]) for each in metadata[tensors]
        ]
    assert ("dynamic_batching" in config) == bool(batch)


@pytest.mark.parametrize("model", ["toy", ""])
async def test_statistics(sharing: Stage, model: str) -> None:
    async with triton_client("grpc", sharing.grpc, sharing.http) as client:
        await client.call("infer", "toy", [client.input("in_0", X)])
    found = await from_all(sharing, "get_inference_statistics", model)
    for form in ("grpc", "grpc.aio"):
        require_within(found["http"], found[form])
    assert found["http"] == found["http.aio"]


@pytest.mark.parametrize("method", ["get_trace_settings", "get_log_settings"])
async def test_settings(sharing: Stage, method: str) -> None:
    found = await from_all(sharing, method)
    assert found["http"] == found["http.aio"]
    for form in ("grpc", "grpc.aio"):
        told = {}
        for name, setting in found[form]["settings"].items():
            ((_, value),) = setting.items()
            single = name != "trace_level" and isinstance(value, list)
            told[name] = value[0] if single else value
        require_within(found["http"], told)


async def test_server_metadata_and_index(sharing: Stage) -> None:
    told = await from_all(sharing, "get_server_metadata")
    assert all(each == told["http"] for each in told.values())
    index = await from_all(sharing, "get_model_repository_index")
    for form in ("grpc", "grpc.aio"):
        require_within(index["http"], index[form]["models"])


@pytest.mark.parametrize(
    ("count", "classes"),
    [
        (1, [["3.000000:1:goldfish"], ["9.500000:3"]]),
        (
            3,
            [
                ["3.000000:1:goldfish", "3.000000:3", "0.250000:0:tench"],
                ["9.500000:3", "9.000000:0:tench", "9.000000:1:goldfish"],
            ],
        ),
        (
            99,
            [
                ["3.000000:1:goldfish", "3.000000:3", "0.250000:0:tench", "-1.000000:2:shark"],
                ["9.500000:3", "9.000000:0:tench", "9.000000:1:goldfish", "9.000000:2:shark"],
            ],
        ),
    ],
)
async def test_classes(client: TritonClient, count: int, classes: list[list[str]]) -> None:
    wanted = client.output("out_0", class_count=count)
    answer = await client.call("infer", "toy", [client.input("in_0", X)], outputs=[wanted])
    got = answer.as_numpy("out_0")
    texts = [[each if isinstance(each, str) else each.decode() for each in row] for row in got]
    assert texts == classes


async def test_classes_within_json(sharing: Stage) -> None:
    async with triton_client("http", sharing.grpc, sharing.http) as client:
        wanted = client.output("out_0", class_count=1, binary_data=False)
        answer = await client.call("infer", "toy", [client.input("in_0", X)], outputs=[wanted])
        told = answer.get_output("out_0")
        assert (told["datatype"], told["shape"]) == ("BYTES", [2, 1])
        assert told["data"] == ["3.000000:1:goldfish", "9.500000:3"]


async def test_classes_of_a_model_without_rows_and_beside_another_output(
    client: TritonClient,
) -> None:
    whole = np.array([1.5, np.nan, 2.5])
    wanted = client.output("out_0", class_count=3)
    answer = await client.call("infer", "whole", [client.input("in_0", whole)], outputs=[wanted])
    got = [each if isinstance(each, str) else each.decode() for each in answer.as_numpy("out_0")]
    assert got == ["2.500000:2", "1.500000:0", "nan:1"]
    first, second = X[:, :2].copy(), np.array([-(2**63), 7], np.int64)
    answer = await client.call(
        "infer",
        "pair",
        [client.input("in_0", first), client.input("in_1", second)],
        outputs=[client.output("out_1", class_count=1), client.output("out_0")],
    )
    np.testing.assert_array_equal(answer.as_numpy("out_0"), first)
    got = [
        each if isinstance(each, str) else each.decode() for each in answer.as_numpy("out_1")[:, 0]
    ]
    assert got == [f"{-(2**63)}:0", "7:0"]


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        ("text", np.array([[b"a", b"b"]], np.object_), "an output of BYTES has no classes"),
        ("flags", np.array([True]), "an output of BOOL has no classes"),
    ],
)
async def test_texts_and_flags_have_no_classes(
    client: TritonClient, model: str, given: np.ndarray, says: str
) -> None:
    tensors = [client.input("in_0", given)]
    if model == "flags":
        tensors.append(client.input("in_1", np.array([1], np.uint8)))
    with pytest.raises(InferenceServerException, match=says):
        await client.call("infer", model, tensors, outputs=[client.output("out_0", class_count=1)])


async def test_a_timeout_is_a_deadline(client: TritonClient, sharing: Stage) -> None:
    sharing.agent.hold = True
    with pytest.raises(InferenceServerException, match="deadline passed"):
        await client.call("infer", "toy", [client.input("in_0", X)], timeout=50_000)
    sharing.agent.hold = False
    await client.call("infer", "toy", [client.input("in_0", X)], timeout=0)


def test_the_enum_of_datatypes_is_tritons() -> None:
    from tritonclient.grpc import model_config_pb2

    assert dict(oip.DataType.items()) == dict(model_config_pb2.DataType.items())
