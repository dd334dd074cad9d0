"""KServe's clients for inference, over REST and over gRPC."""

from __future__ import annotations

import logging

import numpy as np
from features import API_KEY, BASE_URL, GRPC_ADDRESS, NUMBER_MODEL, WORD_MODEL, feature, report
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

logging.disable(logging.CRITICAL)  # errors are raised as well
HEADERS = {"authorization": f"Bearer {API_KEY}"}
METADATA = tuple(HEADERS.items())
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def rest() -> InferenceRESTClient:
    return InferenceRESTClient(RESTConfig(protocol="v2"))


def request(*, binary: bool) -> InferRequest:
    given = InferInput("x", list(X.shape), "FP32")
    given.set_data_from_numpy(X, binary_data=binary)
    return InferRequest(NUMBER_MODEL, [given])


@feature("REST: is_server_live, is_server_ready, is_model_ready")
async def rest_ready() -> None:
    client = rest()
    assert await client.is_server_live(BASE_URL, headers=HEADERS)
    assert await client.is_server_ready(BASE_URL, headers=HEADERS)
    assert await client.is_model_ready(BASE_URL, NUMBER_MODEL, headers=HEADERS)


@feature("REST: infer, as JSON and as bytes")
async def rest_infer() -> None:
    for binary in (False, True):
        asked = request(binary=binary)
        answer = await rest().infer(BASE_URL, asked, model_name=NUMBER_MODEL, headers=dict(HEADERS))
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), 2 * X)


@feature("gRPC: is_server_live, is_server_ready, is_model_ready")
async def grpc_ready() -> None:
    async with InferenceGRPCClient(GRPC_ADDRESS) as client:
        assert await client.is_server_live(headers=METADATA)
        assert await client.is_server_ready(headers=METADATA)
        assert await client.is_model_ready(NUMBER_MODEL, headers=METADATA)


@feature("gRPC: infer, as contents and as bytes")
async def grpc_infer() -> None:
    async with InferenceGRPCClient(GRPC_ADDRESS) as client:
        for binary in (False, True):
            answer = await client.infer(request(binary=binary), headers=METADATA)
            np.testing.assert_array_equal(answer.outputs[0].as_numpy(), 2 * X)


@feature("texts (BYTES), over both")
async def texts() -> None:
    given = InferInput("words", [1, 2], "BYTES", data=["Cat", "dog"])
    asked = InferRequest(WORD_MODEL, [given])
    answer = await rest().infer(BASE_URL, asked, model_name=WORD_MODEL, headers=dict(HEADERS))
    assert "CatCat" in str(answer.outputs[0].data)
    words = InferInput("words", [1, 2], "BYTES")
    words.set_data_from_numpy(np.array([["Cat", "dog"]], np.object_), binary_data=True)
    async with InferenceGRPCClient(GRPC_ADDRESS) as client:
        answer = await client.infer(InferRequest(WORD_MODEL, [words]), headers=METADATA)
    assert answer.outputs[0].as_numpy().tolist()[0][0] in (b"CatCat", "CatCat")


@feature(
    "REST: the protocol's version 1, and explain",
    refused="405",
    because="only version 2 of the protocol is offered, and models are not explained",
)
async def version_one() -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    await client.infer(
        BASE_URL, {"instances": X.tolist()}, model_name=NUMBER_MODEL, headers=dict(HEADERS)
    )


report("kserve")
