"""Pure converters between gRPC messages of the Open Inference Protocol and the gateway's types."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from catenary_gateway.catalog import Model
from catenary_gateway.inference import (
    NO_OPTIONS,
    ConversionContext,
    InferenceRequest,
    InferenceResponse,
    OutputFormat,
    RegionSlice,
    Tensor,
    TensorMemory,
)
from catenary_gateway.tensors import raw_tensors, tensor_parameters, typed_contents
from catenary_gateway.tensors.request_parameters import terms_of
from catenary_gateway.tensors.validation import (
    DeclaredInput,
    check_id,
    check_inputs,
    check_outputs,
)
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.domain.tensors import BYTES
from catenary_services.errors import InvalidInput

AnyParameter = (
    oip.InferParameter | oip.ModelRepositoryParameter | oip.LogSettingsRequest.SettingValue
)


_VIEWED_BYTES = 16_384
"""Raw contents of shorter messages are not worth looking for."""
_MOST_FIELDS = 256
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_LONGEST_SHIFT = 63
_RAW_CONTENTS_TAG = oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request as it came, whose raw contents were not copied out of it."""

    message: oip.ModelInferRequest
    """The request, without raw contents where `raw` has them."""
    raw: Sequence[bytes | memoryview]
    """The raw contents in their order."""
    nbytes: int


def received_request(data: bytes | bytearray) -> ReceivedRequest:
    """Returns the request in some bytes, with views of its raw contents if they are large.

    Raises:
        Exception: There is none in them, as protobuf says it.
    """
    views: list[memoryview] = []
    described: bytes | bytearray = data
    if len(data) > _VIEWED_BYTES:
        rest, at, whole = list[memoryview](), 0, memoryview(data).toreadonly()
        for field, begin, end in _raw_contents(data):
            rest.append(whole[at:field])
            views.append(whole[begin:end])
            at = end
        if views:
            described = b"".join((*rest, whole[at:]))
    message = oip.ModelInferRequest.FromString(bytes(described))
    return ReceivedRequest(message, views or message.raw_input_contents, len(data))


def _raw_contents(data: bytes | bytearray) -> list[tuple[int, int, int]]:
    """Returns where each field of raw contents begins, and where its bytes begin and end.

    There are none if this is no message, or one of more fields than usual: protobuf reads it whole.
    """
    found, at, size = list[tuple[int, int, int]](), 0, len(data)
    try:
        for _ in range(_MOST_FIELDS):
            if at >= size:
                return found if at == size else []
            field = at
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                length, at = _varint(data, at)
                if tag == _RAW_CONTENTS_TAG:
                    found.append((field, at, at + length))
                at += length
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                return []
    except IndexError:
        pass
    return []


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and the place behind it."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > _LONGEST_SHIFT:
            raise IndexError
    return value | byte << shift, at + 1


def request_of(
    received: ReceivedRequest, model: Model, conversion: ConversionContext
) -> tuple[InferenceRequest, OutputFormat]:
    """Returns a request, and the format of its answer.

    The arrays may be views of the bytes that were received.

    Raises:
        InvalidInput: The request is wrong; the error names the field.
        CatenaryError: The request asks for what is not offered, or its tensors cannot be read.
    """
    message = received.message
    declared = [
        DeclaredInput(tensor.name, tensor.datatype, tuple(tensor.shape))
        for tensor in message.inputs
    ]
    rows = check_inputs(model, declared, conversion.max_bytes)
    places = [
        tensor_parameters.place_of(plain_parameters(tensor.parameters), f"inputs[{at}].parameters")
        if tensor.parameters
        else None
        for at, tensor in enumerate(message.inputs)
    ]
    here = [at for at, place in enumerate(places) if place is None]
    raw = len(received.raw) > 0
    given = _raw_inputs(received, declared, here) if raw else _typed_inputs(message, declared, here)
    if len(here) < len(places):
        given |= _inputs_in_memory(message, declared, places, conversion.memory)
    wanted = check_outputs(model, [output.name for output in message.outputs])
    request = InferenceRequest(
        model=model,
        id=check_id(message.id) or conversion.default_id,
        inputs={spec.name: given[spec.name] for spec in model.inputs},
        rows=rows,
        outputs=wanted,
        options=terms_of(plain_parameters(message.parameters), conversion.now_unix_ns)
        if message.parameters
        else NO_OPTIONS,
    )
    parameters = [
        plain_parameters(output.parameters) if output.parameters else {}
        for output in message.outputs
    ]
    # What gives tensors as bytes reads them as bytes.
    form = OutputFormat(raw=raw or len(here) < len(places))
    if any(parameters):
        form = tensor_parameters.with_outputs(form, model, wanted, parameters, conversion.memory)
    return request, form


def response_of(
    response: InferenceResponse, form: OutputFormat, wanted: tuple[int, ...], memory: TensorMemory
) -> oip.ModelInferResponse:
    """Returns the message for `response`, in raw form if wanted or if an output has no other.

    Outputs that have a place in `memory` are written there.

    Raises:
        CatenaryError: An output cannot be written.
    """
    model = response.model
    message = oip.ModelInferResponse(
        model_name=model.key.name, model_version=model.key.version, id=response.id
    )
    specs = [model.outputs[index] for index in wanted]
    raw = form.raw or not all(typed_contents.has_typed_form(spec.datatype) for spec in specs)
    for at, (spec, array) in enumerate(zip(specs, response.outputs, strict=True)):
        # Classes are texts, of whatever datatype the output is.
        datatype = BYTES if array.dtype.hasobject else spec.datatype
        output = message.outputs.add(name=spec.name, datatype=datatype, shape=array.shape)
        place = form.places[at] if form.places else None
        if place is not None:
            data = raw_tensors.to_raw(array)
            memory.write(place, data, f"outputs[{at}].parameters")
            _tell_place(output.parameters, place, len(data))
            if raw:
                # Clients find the bytes of an output by its number.
                message.raw_output_contents.append(b"")
        elif raw:
            message.raw_output_contents.append(raw_tensors.to_raw(array))
        else:
            output.contents.CopyFrom(typed_contents.to_contents(array, datatype))
    return message


def metadata_of(model: Model, versions: list[str]) -> oip.ModelMetadataResponse:
    """Returns the metadata of a model: its versions, platform and tensors."""
    form = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name=model.key.name,
        versions=versions,
        platform=model.platform,
        inputs=[form(name=s.name, datatype=s.datatype, shape=s.shape) for s in model.inputs],
        outputs=[form(name=s.name, datatype=s.datatype, shape=s.shape) for s in model.outputs],
    )


def plain_parameters(parameters: Mapping[str, AnyParameter]) -> dict[str, object]:
    """Returns parameters as plain values by name; None for one without a value."""
    plain: dict[str, object] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        plain[name] = None if choice is None else getattr(parameter, choice)
    return plain


def log_value(value: bool | int | str) -> oip.LogSettingsResponse.SettingValue:
    """Returns the message for the value of a log setting."""
    form = oip.LogSettingsResponse.SettingValue
    if isinstance(value, bool):
        return form(bool_param=value)
    return form(uint32_param=value) if isinstance(value, int) else form(string_param=value)


def _tell_place(
    parameters: MutableMapping[str, oip.InferParameter], place: RegionSlice, size_bytes: int
) -> None:
    parameters[tensor_parameters.REGION].string_param = place.region
    parameters[tensor_parameters.OFFSET].int64_param = place.offset
    parameters[tensor_parameters.SIZE].int64_param = size_bytes


def _inputs_in_memory(
    message: oip.ModelInferRequest,
    declared: Sequence[DeclaredInput],
    places: Sequence[RegionSlice | None],
    memory: TensorMemory,
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for at, (tensor, place) in enumerate(zip(declared, places, strict=True)):
        if place is None:
            continue
        if message.inputs[at].contents.ByteSize():
            raise InvalidInput(
                f"inputs[{at}].contents", "and a place in shared memory exclude each other"
            )
        field = f"inputs[{at}].parameters"
        found[tensor.name] = raw_tensors.from_raw(memory.read(place, field), tensor, field)
    return found


def _raw_inputs(
    received: ReceivedRequest, declared: Sequence[DeclaredInput], here: Sequence[int]
) -> dict[str, Tensor]:
    """Returns the inputs in `raw_input_contents`: those whose numbers are in `here`."""
    for at, tensor in enumerate(received.message.inputs):
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            raise InvalidInput(
                f"inputs[{at}].contents", "typed contents and raw_input_contents exclude each other"
            )
    contents = received.raw
    if len(contents) != len(here):
        raise InvalidInput(
            "raw_input_contents", f"has {len(contents)} entries for {len(here)} inputs"
        )
    return {
        declared[at].name: raw_tensors.from_raw(
            contents[entry], declared[at], f"raw_input_contents[{entry}]"
        )
        for entry, at in enumerate(here)
    }


def _typed_inputs(
    message: oip.ModelInferRequest, declared: Sequence[DeclaredInput], here: Sequence[int]
) -> dict[str, Tensor]:
    return {
        declared[at].name: typed_contents.from_contents(
            message.inputs[at].contents, declared[at], f"inputs[{at}].contents"
        )
        for at in here
    }
