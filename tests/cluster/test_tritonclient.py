"""Unmodified tritonclient against a real cluster; tests/gateway has the endpoints in all detail."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

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


def names(client: triton_grpc.InferenceServerClient) -> tuple[str, str]:
    metadata = client.get_model_metadata(MODEL)
    return metadata.inputs[0].name, metadata.outputs[0].name


def over_grpc(tensor: str, image: np.ndarray) -> triton_grpc.InferInput:
    given = triton_grpc.InferInput(tensor, list(image.shape), "FP32")
    given.set_data_from_numpy(image)
    return given


def test_the_model_is_ready_and_described(grpc_client, http_client) -> None:
    for client in (grpc_client, http_client):
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
    metadata = grpc_client.get_model_metadata(MODEL)
    assert list(metadata.inputs[0].shape) == [-1, 3, 224, 224]
    assert list(metadata.outputs[0].shape) == [-1, 1000]
    assert [model.name for model in grpc_client.get_model_repository_index().models] == [MODEL]


def test_grpc_raw_inference_recognises_a_cat(grpc_client, image) -> None:
    tensor, output = names(grpc_client)
    answer = grpc_client.infer(MODEL, [over_grpc(tensor, image)])
    best = int(answer.as_numpy(output)[0].argmax())
    assert "cat" in labels()[best].lower()


@pytest.mark.parametrize("binary", [True, False])
def test_http_inference_equals_grpc(grpc_client, http_client, image, binary) -> None:
    tensor, output = names(grpc_client)
    expected = grpc_client.infer(MODEL, [over_grpc(tensor, image)]).as_numpy(output)
    over_http = triton_http.InferInput(tensor, list(image.shape), "FP32")
    over_http.set_data_from_numpy(image, binary_data=binary)
    wanted = triton_http.InferRequestedOutput(output, binary_data=binary)
    answer = http_client.infer(MODEL, [over_http], outputs=[wanted])
    np.testing.assert_allclose(answer.as_numpy(output), expected, rtol=1e-3, atol=1e-3)


def test_a_batch_is_split_and_merged_without_mixing_rows(grpc_client) -> None:
    tensor, output = names(grpc_client)
    photographs = [
        preprocess(sample_photographs()[name]) for name in ("chelsea", "coffee", "rocket")
    ]
    singles = [
        grpc_client.infer(MODEL, [over_grpc(tensor, picture)]).as_numpy(output)[0]
        for picture in photographs
    ]
    order = [0, 1, 2, 2, 1, 0, 1]
    batch = np.concatenate([photographs[index] for index in order])
    rows = grpc_client.infer(MODEL, [over_grpc(tensor, batch)]).as_numpy(output)
    assert rows.shape == (7, 1000)
    for row, index in zip(rows, order, strict=True):
        np.testing.assert_allclose(row, singles[index], rtol=0.02, atol=0.02)
