"""The bytes of a request in the forms that servers take, and how their answers are read.

They are made once and played back, so that no client's Python stands in the measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.workloads import Workload
from catenary.rpc.messages import infer_request, infer_result
from catenary.tensors import Array, encode
from catenary.types import InferRequest
from catenary_protos.inference import grpc_predict_v2_pb2 as oip

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
GRPC_PREFIX_BYTES = 5
"""A flag (not compressed) and the length of the message, in front of every gRPC message."""
_HEADER_LENGTH = "Inference-Header-Content-Length"
_OCTETS, _JSON = "application/octet-stream", "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is sent: path, headers and body; `read` returns the tensor of an answer."""

    form: str
    path: str
    body: bytes
    headers: dict[str, str]
    read: Callable[[bytes, dict[str, str]], Array] = field(repr=False)


Form = Callable[[Workload], Request]


def oip_grpc(workload: Workload) -> Request:
    """Returns the gRPC call of the Open Inference Protocol, as the SDK makes it."""
    inputs = {workload.input_name: workload.row}
    message = infer_request(InferRequest(workload.name, inputs, request_id="")).SerializeToString()

    def read(answer: bytes, _headers: dict[str, str]) -> Array:
        message = oip.ModelInferResponse.FromString(answer[GRPC_PREFIX_BYTES:])
        return infer_result(message).outputs[workload.output_name]

    return Request(
        "OIP, raw contents",
        GRPC_PATH,
        b"\0" + len(message).to_bytes(4, "big") + message,
        {"content-type": "application/grpc", "te": "trailers"},
        read,
    )


def oip_binary(workload: Workload) -> Request:
    """Returns the HTTP request of the Open Inference Protocol with Triton's binary tensors."""
    datatype, raw = encode(workload.row)
    tensor = {
        "name": workload.input_name,
        "shape": list(workload.row.shape),
        "datatype": datatype,
        "parameters": {"binary_data_size": len(raw)},
    }
    document = _json({"inputs": [tensor], "parameters": {"binary_data_output": True}})

    def read(answer: bytes, headers: dict[str, str]) -> Array:
        size = int(headers[_HEADER_LENGTH.lower()])
        (output,) = json.loads(answer[:size])["outputs"]
        return np.frombuffer(answer[size:], np.float32).reshape(output["shape"])

    return Request(
        "OIP, binary tensors",
        f"/v2/models/{workload.name}/infer",
        document + raw,
        {"content-type": _OCTETS, _HEADER_LENGTH.lower(): str(len(document))},
        read,
    )


def oip_json(workload: Workload) -> Request:
    """Returns the HTTP request of the Open Inference Protocol in plain JSON."""
    tensor = {
        "name": workload.input_name,
        "shape": list(workload.row.shape),
        "datatype": "FP32",
        "data": workload.row.ravel().tolist(),
    }

    def read(answer: bytes, _headers: dict[str, str]) -> Array:
        (output,) = json.loads(answer)["outputs"]
        return np.asarray(output["data"], np.float32).reshape(output["shape"])

    path = f"/v2/models/{workload.name}/infer"
    return Request("OIP, JSON", path, _json({"inputs": [tensor]}), {"content-type": _JSON}, read)


def plain_json(workload: Workload) -> Request:
    """Returns a request whose body is the row in JSON, and whose answer is a list in JSON."""

    def read(answer: bytes, _headers: dict[str, str]) -> Array:
        return np.asarray(json.loads(answer), np.float32)

    body = _json({"row": workload.row.tolist()})
    return Request("JSON", f"/{workload.name}", body, {"content-type": _JSON}, read)


def plain_bytes(workload: Workload) -> Request:
    """Returns a request whose body, like its answer, is nothing but the tensor's bytes."""

    def read(answer: bytes, _headers: dict[str, str]) -> Array:
        return np.frombuffer(answer, np.float32).reshape(workload.expected.shape)

    body, headers = workload.row.tobytes(), {"content-type": _OCTETS}
    return Request("bytes", f"/{workload.name}", body, headers, read)


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
