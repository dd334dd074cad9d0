"""NVIDIA's tritonclient over gRPC and over HTTP.

The table of docs/open-inference-protocol.md goes through every call; here are the kinds of use.
"""

from __future__ import annotations

import asyncio
import os
import queue
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
import tritonclient.utils.shared_memory as memory
from features import (
    API_KEY,
    BASE_URL,
    EMBEDDING_MODEL,
    GRPC_ADDRESS,
    NUMBER_MODEL,
    WORD_MODEL,
    error_of,
    feature,
    report,
)
from tritonclient.utils import InferenceServerException

HTTP_ADDRESS = BASE_URL.removeprefix("http://")
grpc_client = over_grpc.InferenceServerClient(GRPC_ADDRESS)
http_client = over_http.InferenceServerClient(HTTP_ADDRESS)
BOTH: list[tuple[Any, Any]] = [(over_grpc, grpc_client), (over_http, http_client)]
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def key() -> dict[str, str]:
    """Returns headers for one call: the client for HTTP adds its own to them."""
    return {"authorization": f"Bearer {API_KEY}"}


def tensor(module: Any, name: str, array: np.ndarray, kind: str = "FP32") -> Any:
    made = module.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


@feature("is_server_live, is_server_ready, is_model_ready")
def ready() -> None:
    for _, client in BOTH:
        assert client.is_server_live(headers=key())
        assert client.is_server_ready(headers=key())
        assert client.is_model_ready(NUMBER_MODEL, headers=key())


@feature("get_server_metadata, get_model_metadata, get_model_config, get_model_repository_index")
def described() -> None:
    told = http_client.get_model_metadata(NUMBER_MODEL, headers=key())
    assert told["inputs"][0]["shape"] == [-1, 4]
    assert grpc_client.get_model_config(NUMBER_MODEL, headers=key()).config.input[0].dims == [4]
    for _, client in BOTH:
        assert client.get_server_metadata(headers=key())
        assert client.get_model_repository_index(headers=key())


@feature("infer, over HTTP as bytes or as JSON")
def infer() -> None:
    for module, client in BOTH:
        answer = client.infer(NUMBER_MODEL, [tensor(module, "x", X)], headers=key())
        np.testing.assert_array_equal(answer.as_numpy("y"), 2 * X)
    given = over_http.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(X, binary_data=False)
    wanted = over_http.InferRequestedOutput("y", binary_data=False)
    answer = http_client.infer(NUMBER_MODEL, [given], outputs=[wanted], headers=key())
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * X)


@feature("infer with BYTES, also for an encoder of texts")
def texts() -> None:
    words = np.array([["Cat", "dog"]], np.object_)
    sentences = np.array(["a cat", "the dog"], np.object_)
    for module, client in BOTH:
        given = tensor(module, "words", words, "BYTES")
        answer = client.infer(WORD_MODEL, [given], headers=key())
        assert answer.as_numpy("twice").tolist() == [[b"CatCat", b"dogdog"]]
        described = client.get_model_metadata(EMBEDDING_MODEL, headers=key())
        is_json = isinstance(described, dict)
        name = described["inputs"][0]["name"] if is_json else described.inputs[0].name
        given = tensor(module, name, sentences, "BYTES")
        assert client.infer(EMBEDDING_MODEL, [given], headers=key())


@feature("class_count, with names of classes")
def classes() -> None:
    for module, client in BOTH:
        wanted = module.InferRequestedOutput("y", class_count=2)
        answer = client.infer(
            NUMBER_MODEL, [tensor(module, "x", X)], outputs=[wanted], headers=key()
        )
        (first, second) = answer.as_numpy("y")[0]
        assert first.decode().endswith(":3:west"), first
        assert second.decode().endswith(":2:south"), second


@feature("async_infer, and both clients of asyncio")
async def asynchronous() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    grpc_client.async_infer(
        NUMBER_MODEL,
        [tensor(over_grpc, "x", X)],
        lambda result, error: answers.put(error or result),
        headers=key(),
    )
    got = [await asyncio.to_thread(answers.get, timeout=60)]
    pending = http_client.async_infer(NUMBER_MODEL, [tensor(over_http, "x", X)], headers=key())
    got.append(pending.get_result())
    for module, address in ((over_grpc_aio, GRPC_ADDRESS), (over_http_aio, HTTP_ADDRESS)):
        async with module.InferenceServerClient(address) as client:
            made = tensor(module, "x", X)
            got.append(await client.infer(NUMBER_MODEL, [made], headers=key()))
    for answer in got:
        np.testing.assert_array_equal(answer.as_numpy("y"), 2 * X)


@feature("start_stream, async_stream_infer")
def stream() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with over_grpc.InferenceServerClient(GRPC_ADDRESS) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers=key())
        for number in range(3):
            client.async_stream_infer(NUMBER_MODEL, [tensor(over_grpc, "x", X + number)])
        got = [answers.get(timeout=60).as_numpy("y") for _ in range(3)]
        client.stop_stream()
    for number, answer in enumerate(got):
        np.testing.assert_array_equal(answer, 2 * (X + number))


@feature(
    "system shared memory",
    partly="on the gateway's own machine, if `shared_memory_prefix` is set there",
)
def shared_memory() -> None:
    name = f"/{os.environ['SHARED_MEMORY_PREFIX']}x"
    region = memory.create_shared_memory_region("region", name, 2 * X.nbytes)
    try:
        memory.set_shared_memory_region(region, [X])
        for module, client in BOTH:
            client.register_system_shared_memory("region", name, 2 * X.nbytes, headers=key())
            given = module.InferInput("x", [2, 4], "FP32")
            given.set_shared_memory("region", X.nbytes)
            wanted = module.InferRequestedOutput("y")
            wanted.set_shared_memory("region", X.nbytes, offset=X.nbytes)
            client.infer(NUMBER_MODEL, [given], outputs=[wanted], headers=key())
            found = memory.get_contents_as_numpy(region, np.float32, [2, 4], X.nbytes)
            np.testing.assert_array_equal(found, 2 * X)
            client.unregister_system_shared_memory("region", headers=key())
    finally:
        memory.destroy_shared_memory_region(region)


@feature("get_inference_statistics")
def statistics() -> None:
    told = http_client.get_inference_statistics(NUMBER_MODEL, headers=key())
    assert told["model_stats"][0]["inference_count"] > 0
    assert grpc_client.get_inference_statistics(headers=key()).model_stats


@feature("trace and log settings: get and update")
def settings() -> None:
    for _, client in BOTH:
        assert client.get_trace_settings(headers=key())
        assert client.update_trace_settings(settings={"trace_rate": "1000"}, headers=key())
        assert client.get_log_settings(headers=key())
        assert client.update_log_settings({"log_info": True}, headers=key())


@feature(
    "load_model, unload_model",
    partly="models of a plan that an operator applied by hand, as here, are not unloaded",
)
def load() -> None:
    for _, client in BOTH:
        client.load_model(WORD_MODEL, headers=key())
        error = error_of(InferenceServerException, partial(client.unload_model, WORD_MODEL, key()))
        assert "is in the plan applied by hand" in str(error)


@feature("compression of requests and answers (HTTP)")
def compression() -> None:
    answer = http_client.infer(
        NUMBER_MODEL,
        [tensor(over_http, "x", X)],
        headers=key(),
        request_compression_algorithm="gzip",
        response_compression_algorithm="gzip",
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * X)


@feature("sequences", refused="no state is kept from one request to the next")
def sequences() -> None:
    given = [tensor(over_grpc, "x", X)]
    grpc_client.infer(NUMBER_MODEL, given, sequence_id=7, sequence_start=True, headers=key())


@feature(
    "load_model with a configuration", refused="a model is deployed as it lies in the repository"
)
def load_with_config() -> None:
    grpc_client.load_model(NUMBER_MODEL, config="{}", headers=key())


@feature("CUDA shared memory", refused="CUDA shared memory is not offered")
def cuda() -> None:
    grpc_client.register_cuda_shared_memory("region", b"AAAA", 0, 64, headers=key())


report("tritonclient")
