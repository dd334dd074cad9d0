"""Unmodified tritonclient against a real cluster, over gRPC and HTTP."""

from __future__ import annotations

import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from catenaryd.demo.demo_models import labels, preprocess, sample_photographs
from cluster_harness import MODEL, RunningCluster


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return preprocess(sample_photographs()["chelsea"])


@pytest.fixture
def grpc_client(cluster: RunningCluster):
    with triton_grpc.InferenceServerClient(cluster.grpc) as client:
        yield client


@pytest.fixture
def http_client(cluster: RunningCluster):
    client = triton_http.InferenceServerClient(cluster.http.removeprefix("http://"))
    yield client
    client.close()


def names(client: object) -> tuple[str, str]:
    metadata = client.get_model_metadata(MODEL)
    if isinstance(metadata, dict):
        return metadata["inputs"][0]["name"], metadata["outputs"][0]["name"]
    return metadata.inputs[0].name, metadata.outputs[0].name


def test_grpc_server_and_model_are_live_ready_and_described(grpc_client) -> None:
    assert grpc_client.is_server_live()
    assert grpc_client.is_server_ready()
    assert grpc_client.is_model_ready(MODEL)
    assert grpc_client.get_server_metadata().name == "catenary"
    metadata = grpc_client.get_model_metadata(MODEL)
    assert list(metadata.inputs[0].shape) == [-1, 3, 224, 224]
    assert list(metadata.outputs[0].shape) == [-1, 1000]
    assert [model.name for model in grpc_client.get_model_repository_index().models] == [MODEL]


def test_http_server_and_model_are_live_ready_and_described(http_client) -> None:
    assert http_client.is_server_live()
    assert http_client.is_server_ready()
    assert http_client.is_model_ready(MODEL)
    assert http_client.get_server_metadata()["name"] == "catenary"
    assert http_client.get_model_metadata(MODEL)["inputs"][0]["datatype"] == "FP32"


def test_grpc_raw_inference_recognises_a_cat(grpc_client, image) -> None:
    tensor, output = names(grpc_client)
    wanted = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
    wanted.set_data_from_numpy(image)
    answer = grpc_client.infer(
        MODEL, [wanted], outputs=[triton_grpc.InferRequestedOutput(output)], request_id="cat-1"
    )
    assert answer.get_response().id == "cat-1"
    best = int(answer.as_numpy(output)[0].argmax())
    assert "cat" in labels()[best].lower()


@pytest.mark.parametrize("binary", [True, False])
def test_http_inference_equals_grpc(grpc_client, http_client, image, binary) -> None:
    tensor, output = names(grpc_client)
    over_grpc = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
    over_grpc.set_data_from_numpy(image)
    expected = grpc_client.infer(MODEL, [over_grpc]).as_numpy(output)
    over_http = triton_http.InferInput(tensor, list(image.shape), "FP32")
    over_http.set_data_from_numpy(image, binary_data=binary)
    wanted = triton_http.InferRequestedOutput(output, binary_data=binary)
    answer = http_client.infer(MODEL, [over_http], outputs=[wanted])
    np.testing.assert_allclose(answer.as_numpy(output), expected, rtol=1e-3, atol=1e-3)


def test_typed_contents_over_grpc_are_answered_typed(cluster, grpc_client, image) -> None:
    tensor, output = names(grpc_client)
    request = service_pb2.ModelInferRequest(model_name=MODEL, id="typed")
    given = request.inputs.add(name=tensor, datatype="FP32", shape=image.shape)
    given.contents.fp32_contents.extend(image.ravel())
    with grpc.insecure_channel(cluster.grpc) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert answer.id == "typed"
    assert not answer.raw_output_contents
    logits = np.array(answer.outputs[0].contents.fp32_contents)
    assert answer.outputs[0].name == output
    assert "cat" in labels()[int(logits.argmax())].lower()


def test_streaming_inference_answers_in_order(grpc_client, image) -> None:
    tensor, output = names(grpc_client)
    answers: queue.Queue = queue.Queue()
    grpc_client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(4):
        given = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
        given.set_data_from_numpy(image)
        grpc_client.async_stream_infer(MODEL, [given], request_id=f"s{number}")
    got = [answers.get(timeout=30) for _ in range(4)]
    grpc_client.stop_stream()
    assert [error for _, error in got] == [None] * 4
    assert [result.get_response().id for result, _ in got] == ["s0", "s1", "s2", "s3"]
    for result, _ in got:
        assert result.as_numpy(output).shape == (1, 1000)
        assert result.get_response().parameters["triton_final_response"].bool_param


def test_streaming_reports_an_error_and_goes_on(grpc_client, image) -> None:
    tensor, _ = names(grpc_client)
    answers: queue.Queue = queue.Queue()
    grpc_client.start_stream(lambda result, error: answers.put((result, error)))
    wrong = triton_grpc.InferInput(tensor, [1, 3, 8, 8], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3, 8, 8), np.float32))
    right = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
    right.set_data_from_numpy(image)
    grpc_client.async_stream_infer(MODEL, [wrong])
    grpc_client.async_stream_infer(MODEL, [right], request_id="after")
    _, error = answers.get(timeout=30)
    assert "shape" in str(error)
    result, error = answers.get(timeout=30)
    grpc_client.stop_stream()
    assert error is None
    assert result.get_response().id == "after"


def test_errors_are_the_ones_triton_users_know(grpc_client, http_client, image) -> None:
    tensor, _ = names(grpc_client)
    given = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
    given.set_data_from_numpy(image)
    with pytest.raises(InferenceServerException, match="nothing-like-it") as raised:
        grpc_client.infer("nothing-like-it", [given])
    assert "NOT_FOUND" in str(raised.value.status())
    over_http = triton_http.InferInput(tensor, [2, 3], "FP32")
    over_http.set_data_from_numpy(np.zeros((2, 3), np.float32))
    with pytest.raises(InferenceServerException, match=r"inputs\[0\].shape"):
        http_client.infer(MODEL, [over_http])


def test_a_batch_is_split_and_merged_without_mixing_rows(grpc_client) -> None:
    tensor, output = names(grpc_client)
    photographs = [
        preprocess(sample_photographs()[name]) for name in ("chelsea", "coffee", "rocket")
    ]
    singles = []
    for picture in photographs:
        given = triton_grpc.InferInput(tensor, list(picture.shape), "FP32")
        given.set_data_from_numpy(picture)
        singles.append(grpc_client.infer(MODEL, [given]).as_numpy(output)[0])
    order = [0, 1, 2, 2, 1, 0, 1]
    batch = np.concatenate([photographs[index] for index in order])
    given = triton_grpc.InferInput(tensor, list(batch.shape), "FP32")
    given.set_data_from_numpy(batch)
    rows = grpc_client.infer(MODEL, [given]).as_numpy(output)
    assert rows.shape == (7, 1000)
    for row, index in zip(rows, order, strict=True):
        np.testing.assert_allclose(row, singles[index], rtol=0.02, atol=0.02)
