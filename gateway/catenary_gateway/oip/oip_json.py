"""Pure converters between HTTP bodies of the Open Inference Protocol and the gateway's types.

A body is JSON, or JSON followed by the bytes of those tensors whose parameters say
`binary_data_size` (Triton's binary tensor extension, the default of tritonclient).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from catenary_gateway.catalog import Model
from catenary_gateway.inference import (
    ConversionContext,
    InferenceRequest,
    InferenceResponse,
    OutputFormat,
    Tensor,
    TensorMemory,
)
from catenary_gateway.tensors import json_tensors, raw_tensors, tensor_parameters
from catenary_gateway.tensors.json_documents import Document, encoded, inference_of
from catenary_gateway.tensors.request_parameters import terms_of
from catenary_gateway.tensors.validation import (
    DeclaredInput,
    check_id,
    check_inputs,
    check_outputs,
)
from catenary_services.domain.tensors import BYTES
from catenary_services.errors import InvalidInput

_BINARY_SIZE = "binary_data_size"


def request_of(
    body: bytes | memoryview, json_size: int | None, model: Model, conversion: ConversionContext
) -> tuple[InferenceRequest, OutputFormat]:
    """Returns the request in `body`, and the format of its answer.

    Args:
        body: The whole body; the arrays may be views of it.
        json_size: Bytes of the JSON at its beginning; None if it is JSON only.
        model: The model that the path names.
        conversion: Limits, time and the id of a request without one.

    Raises:
        InvalidInput: The request is wrong; the error names the field.
        CatenaryError: The request asks for what is not offered, or its tensors cannot be read.
    """
    document = inference_of(body if json_size is None else memoryview(body)[:json_size])
    tensors = _objects(document, "inputs")
    declared = [_declared(tensor, f"inputs[{at}]") for at, tensor in enumerate(tensors)]
    rows = check_inputs(model, declared, conversion.max_bytes)
    binary = memoryview(body)[len(body) if json_size is None else json_size :]
    given = _arrays(tensors, declared, binary, conversion.memory)
    outputs = _objects(document, "outputs") if document.get("outputs") is not None else []
    wanted = check_outputs(
        model, [_text(o, "name", f"outputs[{i}]") for i, o in enumerate(outputs)]
    )
    parameters = _mapping(document, "parameters", "parameters")
    request = InferenceRequest(
        model=model,
        id=check_id(_text(document, "id", "", default="")) or conversion.default_id,
        inputs={spec.name: given[spec.name] for spec in model.inputs},
        rows=rows,
        outputs=wanted,
        options=terms_of(parameters, conversion.now_unix_ns),
    )
    chosen = [
        _mapping(output, "parameters", f"outputs[{at}].parameters")
        for at, output in enumerate(outputs)
    ]
    form = OutputFormat(binary=_binary_outputs(chosen, parameters, len(wanted)))
    if any(chosen):
        form = tensor_parameters.with_outputs(form, model, wanted, chosen, conversion.memory)
    return request, form


def response_of(
    response: InferenceResponse, form: OutputFormat, wanted: tuple[int, ...], memory: TensorMemory
) -> tuple[list[bytes | memoryview], int | None]:
    """Returns the pieces of the body for `response`, and the size of its JSON.

    The size is None if no bytes follow the JSON.

    Outputs that have a place in `memory` are written there.

    Raises:
        CatenaryError: An output cannot be written, or has no form in JSON.
    """
    model = response.model
    outputs: list[Document] = []
    payload: list[bytes | memoryview] = []
    is_finite = True
    for at, (index, array) in enumerate(zip(wanted, response.outputs, strict=True)):
        spec = model.outputs[index]
        output: Document = {
            "name": spec.name,
            # Classes are texts, of whatever datatype the output is.
            "datatype": BYTES if array.dtype.hasobject else spec.datatype,
            "shape": list(array.shape),
        }
        place = form.places[at] if form.places else None
        if place is not None:
            raw = raw_tensors.to_raw(array)
            memory.write(place, raw, f"outputs[{at}].parameters")
            output["parameters"] = {
                tensor_parameters.REGION: place.region,
                tensor_parameters.OFFSET: place.offset,
                tensor_parameters.SIZE: len(raw),
            }
        elif form.binary[at]:
            piece = raw_tensors.raw_of(array)
            output["parameters"] = {_BINARY_SIZE: len(piece)}
            payload.append(piece)
        else:
            output["data"] = json_tensors.to_json(array, f"outputs[{at}]")
            is_finite = is_finite and json_tensors.is_finite(array)
        outputs.append(output)
    document = encoded(
        {
            "model_name": model.key.name,
            "model_version": model.key.version,
            "id": response.id,
            "outputs": outputs,
        },
        is_finite=is_finite,
    )
    return [document, *payload], len(document) if payload else None


def metadata_of(model: Model, versions: Sequence[str]) -> Document:
    """Returns the metadata of a model: its versions, platform and tensors."""
    return {
        "name": model.key.name,
        "versions": list(versions),
        "platform": model.platform,
        "inputs": [_tensor_metadata(s.name, s.datatype, s.shape) for s in model.inputs],
        "outputs": [_tensor_metadata(s.name, s.datatype, s.shape) for s in model.outputs],
    }


def _tensor_metadata(name: str, datatype: str, shape: Sequence[int]) -> Document:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _objects(document: Document, field: str) -> list[Document]:
    items = document.get(field)
    if not isinstance(items, list):
        raise InvalidInput(field, "must be a list")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidInput(f"{field}[{at}]", "must be an object")
    return items


def _text(item: Document, key: str, field: str, default: str | None = None) -> str:
    value = item.get(key, default)
    if not isinstance(value, str):
        raise InvalidInput(f"{field}.{key}" if field else key, "must be a string")
    return value


def _mapping(item: Document, key: str, field: str) -> Mapping[str, object]:
    value = item.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be an object")
    return value


def _declared(tensor: Document, field: str) -> DeclaredInput:
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise InvalidInput(f"{field}.shape", "must be a list of integers")
    return DeclaredInput(
        _text(tensor, "name", field), _text(tensor, "datatype", field), tuple(shape)
    )


def _arrays(
    tensors: Sequence[Document],
    declared: Sequence[DeclaredInput],
    binary: memoryview,
    memory: TensorMemory,
) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {}
    at = 0
    for index, (tensor, facts) in enumerate(zip(tensors, declared, strict=True)):
        field = f"inputs[{index}]"
        parameters = _mapping(tensor, "parameters", f"{field}.parameters")
        size = parameters.get(_BINARY_SIZE)
        place = tensor_parameters.place_of(parameters, f"{field}.parameters")
        if place is not None:
            if "data" in tensor or size is not None:
                raise InvalidInput(field, "has data, and a place in shared memory")
            raw = memory.read(place, f"{field}.parameters")
            arrays[facts.name] = raw_tensors.from_raw(raw, facts, f"{field}.parameters")
            continue
        if size is None:
            arrays[facts.name] = json_tensors.from_json(tensor.get("data"), facts, f"{field}.data")
            continue
        size_field = f'{field}.parameters["{_BINARY_SIZE}"]'
        if type(size) is not int or size < 0:
            raise InvalidInput(size_field, "must be a size in bytes")
        if "data" in tensor:
            raise InvalidInput(f"{field}.data", f"and {_BINARY_SIZE} exclude each other")
        if at + size > len(binary):
            raise InvalidInput(size_field, f"{size} bytes reach behind the end of the body")
        arrays[facts.name] = raw_tensors.from_raw(binary[at : at + size], facts, size_field)
        at += size
    if at != len(binary):
        raise InvalidInput("body", f"has {len(binary) - at} bytes that belong to no input")
    return arrays


def _binary_outputs(
    chosen: Sequence[Mapping[str, object]], parameters: Mapping[str, object], wanted: int
) -> tuple[bool, ...]:
    default = parameters.get("binary_data_output", False)
    if not isinstance(default, bool):
        raise InvalidInput('parameters["binary_data_output"]', "must be true or false")
    if not chosen:
        return (default,) * wanted
    binary: list[bool] = []
    for at, own in enumerate(chosen):
        is_binary = own.get("binary_data", default)
        if not isinstance(is_binary, bool):
            field = f'outputs[{at}].parameters["binary_data"]'
            raise InvalidInput(field, "must be true or false")
        binary.append(is_binary)
    return tuple(binary)
