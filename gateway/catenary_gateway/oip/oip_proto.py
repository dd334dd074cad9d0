"""Pure converters between gRPC messages of the Open Inference Protocol and the gateway's types."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_gateway.catalog import Model
from catenary_gateway.inference import (
    ConversionContext,
    InferenceRequest,
    InferenceResponse,
    OutputFormat,
    Tensor,
)
from catenary_gateway.tensors import raw_tensors, typed_contents
from catenary_gateway.tensors.validation import (
    DeclaredInput,
    check_id,
    check_inputs,
    check_outputs,
    terms_of,
)
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.errors import InvalidInput


def request_of(
    message: oip.ModelInferRequest, model: Model, conversion: ConversionContext
) -> tuple[InferenceRequest, OutputFormat]:
    """Returns the request in `message`, and the format of its answer.

    The arrays may be views of bytes in `message`.

    Raises:
        InvalidInput: The request is wrong; the error names the field.
    """
    declared = [
        DeclaredInput(tensor.name, tensor.datatype, tuple(tensor.shape))
        for tensor in message.inputs
    ]
    rows = check_inputs(model, declared, conversion.max_bytes)
    raw = len(message.raw_input_contents) > 0
    given = _raw_inputs(message, declared) if raw else _typed_inputs(message, declared)
    request = InferenceRequest(
        model=model,
        id=check_id(message.id) or conversion.default_id,
        inputs={spec.name: given[spec.name] for spec in model.inputs},
        rows=rows,
        outputs=check_outputs(model, [output.name for output in message.outputs]),
        options=terms_of(plain_parameters(message.parameters), conversion.now_unix_ns),
    )
    return request, OutputFormat(raw=raw)


def response_of(
    response: InferenceResponse, form: OutputFormat, wanted: tuple[int, ...]
) -> oip.ModelInferResponse:
    """Returns the message for `response`, in raw form if wanted or if an output has no other."""
    model = response.model
    message = oip.ModelInferResponse(
        model_name=model.key.name, model_version=model.key.version, id=response.id
    )
    specs = [model.outputs[index] for index in wanted]
    raw = form.raw or not all(typed_contents.has_typed_form(spec.datatype) for spec in specs)
    for spec, array in zip(specs, response.outputs, strict=True):
        output = message.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        if raw:
            message.raw_output_contents.append(raw_tensors.to_raw(array))
        else:
            output.contents.CopyFrom(typed_contents.to_contents(array, spec.datatype))
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


def plain_parameters(parameters: Mapping[str, oip.InferParameter]) -> dict[str, object]:
    """Returns parameters as plain values by name; None for one without a value."""
    plain: dict[str, object] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        plain[name] = None if choice is None else getattr(parameter, choice)
    return plain


def _raw_inputs(message: oip.ModelInferRequest, declared: list[DeclaredInput]) -> dict[str, Tensor]:
    for at, tensor in enumerate(message.inputs):
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            raise InvalidInput(
                f"inputs[{at}].contents", "typed contents and raw_input_contents exclude each other"
            )
    contents = message.raw_input_contents
    if len(contents) != len(declared):
        raise InvalidInput(
            "raw_input_contents", f"has {len(contents)} entries for {len(declared)} inputs"
        )
    return {
        tensor.name: raw_tensors.from_raw(contents[at], tensor, f"raw_input_contents[{at}]")
        for at, tensor in enumerate(declared)
    }


def _typed_inputs(
    message: oip.ModelInferRequest, declared: list[DeclaredInput]
) -> dict[str, Tensor]:
    return {
        tensor.name: typed_contents.from_contents(
            message.inputs[at].contents, tensor, f"inputs[{at}].contents"
        )
        for at, tensor in enumerate(declared)
    }
