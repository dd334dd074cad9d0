"""Unmodified tritonclient against the gateway's endpoints."""

from __future__ import annotations

import asyncio
import queue

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway_harness import Stage

X = np.arange(12, dtype=np.float32).reshape(3, 4)


async def in_thread(function, *args):
    return await asyncio.wait_for(asyncio.to_thread(function, *args), 20)


def grpc_input(name: str, array: np.ndarray, datatype: str) -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def http_input(name: str, array: np.ndarray, datatype: str, **how) -> triton_http.InferInput:
    tensor = triton_http.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **how)
    return tensor


async def test_grpc_describes_server_and_models(running: Stage) -> None:
    def look() -> None:
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            assert client.is_server_live()
            assert not client.is_server_ready(), "one model is not ready"
            assert client.is_model_ready("toy")
            assert not client.is_model_ready("cold")
            assert client.get_server_metadata().name == "catenary"
            metadata = client.get_model_metadata("pair")
            assert [list(t.shape) for t in metadata.inputs] == [[-1, 2], [-1]]
            assert metadata.versions == ["1"]
            states = {
                m.name: (m.state, m.reason) for m in client.get_model_repository_index().models
            }
            assert states["toy"] == ("READY", "")
            assert states["cold"] == ("UNAVAILABLE", "model.yaml is wrong")

    await in_thread(look)


async def test_grpc_infers_raw(running: Stage) -> None:
    def infer() -> None:
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            result = client.infer("toy", [grpc_input("in_0", X, "FP32")], request_id="me")
            np.testing.assert_array_equal(result.as_numpy("out_0"), X)
            assert result.get_response().id == "me"
            words = np.array([[b"a", b""], ["ü".encode(), b"long" * 99]], dtype=np.object_)
            result = client.infer("text", [grpc_input("in_0", words, "BYTES")])
            np.testing.assert_array_equal(result.as_numpy("out_0"), words)
            half = np.array([[1, -2.5]], np.float16)
            result = client.infer("half", [grpc_input("in_0", half, "FP16")])
            np.testing.assert_array_equal(result.as_numpy("out_0"), half)

    await in_thread(infer)


async def test_grpc_answers_typed_what_was_asked_typed(running: Stage) -> None:
    def infer() -> None:
        import grpc

        with grpc.insecure_channel(running.grpc) as channel:
            request = service_pb2.ModelInferRequest(model_name="pair")
            first = request.inputs.add(name="in_0", datatype="FP32", shape=[2, 2])
            first.contents.fp32_contents.extend([1, 2, 3, 4.5])
            second = request.inputs.add(name="in_1", datatype="INT64", shape=[2])
            second.contents.int64_contents.extend([-1, 2**40])
            answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert list(answer.outputs[0].contents.fp32_contents) == [1, 2, 3, 4.5]
            assert list(answer.outputs[1].contents.int64_contents) == [-1, 2**40]
            assert not answer.raw_output_contents

    await in_thread(infer)


async def test_grpc_stream_answers_in_order_and_goes_on_after_an_error(running: Stage) -> None:
    def infer() -> list[object]:
        answers: queue.Queue[tuple[object, object]] = queue.Queue()
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for number in range(40):
                name = "nope" if number == 7 else "toy"
                tensor = grpc_input("in_0", X + number, "FP32")
                client.async_stream_infer(name, [tensor], request_id=str(number))
            got = [answers.get(timeout=10) for _ in range(40)]
            client.stop_stream()
        return got

    for number, (result, error) in enumerate(await in_thread(infer)):
        if number == 7:
            assert "MODEL_NOT_FOUND" in str(error)
            continue
        assert error is None
        response = result.get_response()
        assert response.id == str(number)
        assert response.parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("out_0"), X + number)


async def test_http_describes_server_and_models(running: Stage) -> None:
    def look() -> None:
        client = triton_http.InferenceServerClient(running.http)
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert client.is_model_ready("toy")
        assert not client.is_model_ready("cold")
        assert client.get_server_metadata()["name"] == "catenary"
        assert client.get_model_metadata("toy", "1")["inputs"][0]["shape"] == [-1, 4]
        assert {m["name"] for m in client.get_model_repository_index()} >= {"toy", "cold"}
        client.close()

    await in_thread(look)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_http_infers(running: Stage, binary: bool, compression: str | None) -> None:
    def infer() -> None:
        client = triton_http.InferenceServerClient(running.http)
        how = {"binary_data": binary}
        outputs = [triton_http.InferRequestedOutput(f"out_{at}", **how) for at in range(2)]
        first, second = X[:, :2], np.array([1, -2, 3], np.int64)
        result = client.infer(
            "pair",
            [http_input("in_1", second, "INT64", **how), http_input("in_0", first, "FP32", **how)],
            outputs=outputs if not binary else None,
            request_id="me",
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        np.testing.assert_array_equal(result.as_numpy("out_0"), first)
        np.testing.assert_array_equal(result.as_numpy("out_1"), second)
        assert result.get_response()["id"] == "me"
        client.close()

    await in_thread(infer)


async def test_http_infers_bytes_both_ways(running: Stage) -> None:
    def infer() -> None:
        client = triton_http.InferenceServerClient(running.http)
        words = np.array([[b"a", b""], ["ü".encode(), b"x" * 300]], dtype=np.object_)
        for binary in (True, False):
            result = client.infer(
                "text",
                [http_input("in_0", words, "BYTES", binary_data=binary)],
                outputs=[triton_http.InferRequestedOutput("out_0", binary_data=binary)],
            )
            got = result.as_numpy("out_0")
            flat = [x if isinstance(x, bytes) else x.encode() for x in got.reshape(-1)]
            assert flat == list(words.reshape(-1))
        client.close()

    await in_thread(infer)
