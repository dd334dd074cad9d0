"""Targets: what clients ask for: tensors over HTTP and gRPC, and text in the forms of other APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
from google.protobuf.message import DecodeError

from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.admission.request_pipeline import Caller
from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.inference import ConversionContext, InferenceResponse, Tensor
from catenary_gateway.oip import oip_json, oip_proto
from catenary_gateway.oip.caller_memory import CallerMemory
from catenary_gateway.oip.shared_regions import SharedRegions
from catenary_gateway.openai_http.anthropic.message_request import conversation_of, message_of
from catenary_gateway.openai_http.completion_request import chat_of, completion_of
from catenary_gateway.openai_http.encoders import embeddings, reranking, scores
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.models import tokenizing
from catenary_gateway.openai_http.responses.response_request import response_of
from catenary_gateway.tensors.json_documents import document_of
from catenary_gateway.tensors.validation import MAX_ROWS
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import CatenaryError, InternalError, InvalidInput
from catenary_services.transport.bytes_tensors import decode_bytes, encode_bytes
from fuzzing.likely_values import LIKELY
from gateway_harness import MODELS
from parser_fuzzing.target import BrokenPromise, FuzzTarget

_MOST_BYTES = 1 << 20


@cache
def _models() -> list[Model]:
    catalog = Catalog()
    catalog.update(scheduler_pb2.ModelTable(models=MODELS))
    return [catalog.find(each.name, "") for each in MODELS if each.ready]


@cache
def _conversion() -> ConversionContext:
    caller = Caller(Quotas(), "127.0.0.1", "")
    memory = CallerMemory(SharedRegions(None, 1), caller, _MOST_BYTES)
    return ConversionContext(_MOST_BYTES, now_unix_ns=10**18, default_id="made", memory=memory)


def _model(data: bytes) -> Model:
    models = _models()
    return models[data[0] % len(models) if data else 0]


def _check(request: Any, model: Model) -> None:
    """Checks what every later step relies on."""
    if not 0 <= request.rows <= MAX_ROWS:
        raise BrokenPromise(f"{request.rows} rows")
    for spec in model.inputs:
        tensor = request.inputs[spec.name]
        wanted = DTYPE_OF.get(spec.datatype, np.dtype(object))
        if tensor.dtype != wanted or len(tensor.shape) != len(spec.shape):
            raise BrokenPromise(f"{spec.name} is {tensor.dtype} of {tensor.shape}")
        if tensor.nbytes > 8 * _MOST_BYTES:
            raise BrokenPromise(f"{spec.name} has {tensor.nbytes} bytes")


def _refusing(error: CatenaryError) -> None:
    if isinstance(error, InternalError):
        raise BrokenPromise(error.message) from error
    raise error


def _read_json(data: bytes) -> None:
    model, body = _model(data), data[3:]
    size = int.from_bytes(data[1:3], "little")
    try:
        request, _ = oip_json.request_of(
            body, size if size <= len(body) else None, model, _conversion()
        )
    except CatenaryError as error:
        _refusing(error)
        return
    _check(request, model)


def _tensor(datatype: str, shape: tuple[int, ...]) -> Tensor:
    shape = tuple(2 if size < 0 else size for size in shape)
    if datatype == "BYTES":
        made: Any = np.empty(shape, object)
        made[...] = b"ab"
        return made  # type: ignore[no-any-return]
    return np.ones(shape, DTYPE_OF[datatype])


def _json_bodies() -> Iterator[bytes]:
    for at, model in enumerate(_models()):
        inputs: list[dict[str, Any]] = []
        binary = b""
        for spec in model.inputs:
            array = _tensor(spec.datatype, tuple(spec.shape))
            plain = (
                [each.decode() for each in array.reshape(-1)]
                if spec.datatype == "BYTES"
                else array.tolist()
            )
            inputs.append(
                {
                    "name": spec.name,
                    "datatype": spec.datatype,
                    "shape": list(array.shape),
                    "data": plain,
                }
            )
            raw = (
                encode_bytes(list(array.reshape(-1)))
                if spec.datatype == "BYTES"
                else array.tobytes()
            )
            binary += raw
        document = {"id": "a", "inputs": inputs, "parameters": {"priority": 1, "timeout": 5}}
        yield bytes((at, 255, 255)) + json.dumps(document).encode()
        for each, spec in zip(inputs, model.inputs, strict=True):
            del each["data"]
            array = _tensor(spec.datatype, tuple(spec.shape))
            size = (
                len(encode_bytes(list(array.reshape(-1))))
                if spec.datatype == "BYTES"
                else array.nbytes
            )
            each["parameters"] = {"binary_data_size": size}
        document["outputs"] = [
            {
                "name": model.outputs[0].name,
                "parameters": {"binary_data": True, "classification": 2},
            }
        ]
        text = json.dumps(document).encode()
        yield bytes((at,)) + len(text).to_bytes(2, "little") + text + binary


def _read_proto(data: bytes) -> None:
    model = _model(data)
    whole = oip.ModelInferRequest.FromString(data[1:])
    with patch.object(oip_proto, "_VIEWED_BYTES", 0):  # views are taken of large ones else
        received = oip_proto.received_request(data[1:])
    if list(map(bytes, received.raw)) != list(whole.raw_input_contents):
        raise BrokenPromise("protobuf finds other raw contents")
    beside = oip.ModelInferRequest()
    beside.CopyFrom(received.message)
    for message in (beside, whole):
        del message.raw_input_contents[:]
    if beside.SerializeToString(deterministic=True) != whole.SerializeToString(deterministic=True):
        raise BrokenPromise("protobuf reads another message beside them")
    try:
        request, form = oip_proto.request_of(received, model, _conversion())
    except CatenaryError as error:
        _refusing(error)
        return
    _check(request, model)
    del form


def _protos() -> Iterator[bytes]:
    for at, model in enumerate(_models()):
        for raw in (True, False):
            arrays = [_tensor(each.datatype, tuple(each.shape)) for each in model.inputs]
            response = InferenceResponse(model, "id", tuple(arrays))
            from catenary_gateway.inference import OutputFormat

            wanted = tuple(range(len(arrays)))
            answer = oip_proto.response_of(
                response, OutputFormat(raw=raw), wanted, _conversion().memory
            )
            message = oip.ModelInferRequest(
                model_name="m", id="a", raw_input_contents=answer.raw_output_contents
            )
            message.parameters["priority"].int64_param = 1
            for spec, output in zip(model.inputs, answer.outputs, strict=True):
                tensor = message.inputs.add(
                    name=spec.name, datatype=output.datatype, shape=output.shape
                )
                if not answer.raw_output_contents:
                    tensor.contents.CopyFrom(output.contents)
            yield bytes((at,)) + message.SerializeToString()


def _read_bytes(data: bytes) -> object:
    shape = tuple(data[1 : 1 + (data[0] & 3)]) if data else ()
    return decode_bytes(data[1 + len(shape) :], shape)


def _bytes() -> Iterator[bytes]:
    yield b"\1\2" + encode_bytes([b"abc", b""])
    yield b"\2\1\2" + encode_bytes([b"abc", b"d"])
    yield b"\0" + encode_bytes([b"x"])


_READERS: tuple[tuple[str, Callable[[Fields], object]], ...] = (
    ("ChatCompletionsBody", chat_of),
    ("CompletionsBody", completion_of),
    ("ResponseBody", response_of),
    ("MessageBody", message_of),
    ("ConversationBody", conversation_of),
    ("EmbeddingBody", embeddings._wanted),
    ("ScoreBody", scores._wanted),
    ("RerankBody", reranking._wanted),
    ("TokenizeBody", tokenizing._tokenize_body),
    ("DetokenizeBody", tokenizing._detokenize_body),
)


def _read_text(data: bytes) -> object:
    _, read = _READERS[data[0] % len(_READERS) if data else 0]
    found = read(document_of(data[1:]))
    if read is response_of:
        made: Any = found
        return made.completion(made.conversation(()))
    return found


def _texts() -> Iterator[bytes]:
    """Yields bodies with each of the likely values of each field."""
    for at, (name, _) in enumerate(_READERS):
        fields = LIKELY[name]
        usual = {"model": "m"} | {
            field: values[0]
            for field, values in fields.items()
            if field
            in ("messages", "prompt", "input", "text_1", "text_2", "query", "documents", "tokens")
        }
        if name == "MessageBody":
            usual["max_tokens"] = 4
        yield bytes((at,)) + json.dumps(usual).encode()
        for field, values in fields.items():
            for value in values:
                yield bytes((at,)) + json.dumps(usual | {field: value}).encode()


_NAMES = sorted({name for fields in LIKELY.values() for name in fields})
TARGETS = (
    FuzzTarget("bodies/json", _read_json, (CatenaryError,), _json_bodies),
    FuzzTarget("bodies/proto", _read_proto, (CatenaryError, DecodeError), _protos),
    FuzzTarget("bodies/bytes", _read_bytes, (InvalidInput,), _bytes, 512),
    FuzzTarget(
        "bodies/text",
        _read_text,
        (CatenaryError,),
        _texts,
        words=tuple(f'"{name}":'.encode() for name in _NAMES),
    ),
)
