"""Conversion between the clients' dataclasses and protocol messages. Pure."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from catenary import tensors, types
from catenary.errors import CatenaryError, InvalidInputError, PayloadTooLargeError, ProtocolError
from catenary.records import record_of
from catenary.rpc.failures import error_of_reason
from catenary_protos.catenary.v1 import admin_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip

# protobuf refuses messages of 2 GiB; the rest of a request is far below the margin left here.
LARGEST_MESSAGE_BYTES = 2**31 - 2**20
_REASON_AND_TEXT = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)


def infer_request(request: types.InferRequest) -> oip.ModelInferRequest:
    """Returns the message of a request, with raw tensors, and with a new id if it has none.

    Raises:
        InvalidInputError: An input cannot be expressed; the error names it.
        PayloadTooLargeError: No message can hold the inputs.
    """
    if not request.model:
        raise InvalidInputError.at("model", "is empty")
    message = oip.ModelInferRequest(
        model_name=request.model,
        model_version=request.version,
        id=uuid.uuid4().hex if request.request_id is None else request.request_id,
    )
    _add_inputs(message, request.inputs)
    for name in request.outputs or ():
        message.outputs.add(name=name)
    for name, value in request.parameters.items():
        _set_parameter(message.parameters[name], value, f'parameters["{name}"]')
    if request.priority is not None:
        _set_parameter(message.parameters["priority"], request.priority, "priority")
    if request.slo_ms is not None:
        set_slo(message, request.slo_ms)
    return message


def set_slo(message: oip.ModelInferRequest, slo_ms: float) -> None:
    """Writes the SLO into a request, as an integer if it is a whole number of milliseconds."""
    if not (slo_ms > 0 and math.isfinite(slo_ms)):
        raise InvalidInputError.at("slo_ms", f"must be a positive number, not {slo_ms}")
    # Field 4 of a parameter (double) is an extension; whole numbers use the standard field.
    value = int(slo_ms) if float(slo_ms).is_integer() else float(slo_ms)
    _set_parameter(message.parameters["slo_ms"], value, "slo_ms")


def _add_inputs(message: oip.ModelInferRequest, inputs: Mapping[str, tensors.Array]) -> None:
    total = 0
    for name, value in inputs.items():
        array = np.asarray(value)
        total += array.nbytes
        if total > LARGEST_MESSAGE_BYTES:
            raise PayloadTooLargeError(f'the inputs up to "{name}" exceed 2 GiB; send fewer rows')
        datatype, raw = tensors.encode(array, f'inputs["{name}"]')
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(raw)


def _set_parameter(parameter: oip.InferParameter, value: object, field: str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, int) and value < 2**64 and value >= 0:
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    else:
        raise InvalidInputError.at(field, f"{value!r} is no bool, 64-bit integer, float or str")


def infer_result(message: oip.ModelInferResponse) -> types.InferResult:
    """Returns the result in a reply in raw or typed form.

    Raises:
        ProtocolError: The reply contradicts itself.
    """
    raws = message.raw_output_contents
    if raws and len(raws) != len(message.outputs):
        raise ProtocolError(f"the reply has {len(message.outputs)} outputs, {len(raws)} buffers")
    outputs: dict[str, tensors.Array] = {}
    for index, tensor in enumerate(message.outputs):
        field = f'outputs["{tensor.name}"]'
        outputs[tensor.name] = (
            tensors.decode(tensor.datatype, tuple(tensor.shape), raws[index], field)
            if raws
            else tensors.decode_contents(
                tensor.datatype, tuple(tensor.shape), tensor.contents, field
            )
        )
    return types.InferResult(
        outputs, message.id, message.model_name, message.model_version, _parameters(message)
    )


def stream_result(message: oip.ModelStreamInferResponse) -> types.InferResult:
    """Returns one result of a stream; that of a failed request has an error instead of outputs."""
    if not message.error_message:
        return infer_result(message.infer_response)
    reply = message.infer_response
    error = _stream_error(message.error_message)
    error.request_id = reply.id
    return types.InferResult(
        {}, reply.id, reply.model_name, reply.model_version, _parameters(reply), error
    )


def _stream_error(text: str) -> CatenaryError:
    # Triton's form has room for a text only; gateways of Catenary begin it with the reason.
    known = _REASON_AND_TEXT.fullmatch(text)
    return error_of_reason(known[1], known[2]) if known else error_of_reason("INTERNAL", text)


def _parameters(message: oip.ModelInferResponse) -> dict[str, types.ParameterValue]:
    found: dict[str, types.ParameterValue] = {}
    for name, parameter in message.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            found[name] = getattr(parameter, choice)
    return found


def model_list(message: oip.RepositoryIndexResponse) -> list[types.ModelInfo]:
    """Returns the models in a repository index."""
    return [
        types.ModelInfo(
            model.name, model.version, model.state == "READY", model.state, model.reason
        )
        for model in message.models
    ]


def model_metadata(message: oip.ModelMetadataResponse) -> types.ModelMetadata:
    """Returns a model's inputs and outputs."""
    return record_of(types.ModelMetadata, message)


def cluster_status(message: admin_pb2.GetStatusResponse) -> types.ClusterStatus:
    """Returns the cluster's status."""
    agents = tuple(_agent(agent) for agent in message.agents)
    models = tuple(_deployment(model) for model in message.models)
    return record_of(types.ClusterStatus, message, agents=agents, models=models)


def _deployment(message: admin_pb2.ModelStatus) -> types.DeploymentInfo:
    chains = tuple(_chain(chain) for chain in message.chains)
    outcomes = record_of(types.OutcomeCounts, message.outcomes)
    return record_of(types.DeploymentInfo, message, chains=chains, outcomes=outcomes)


def _chain(message: admin_pb2.ChainStatus) -> types.ChainInfo:
    hops = tuple((hop.agent_id, hop.first_block, hop.last_block) for hop in message.hops)
    return record_of(types.ChainInfo, message, hops=hops, role=message.role or "mixed")


def _agent(message: admin_pb2.AgentStatus) -> types.AgentInfo:
    impairments = tuple(_impairment(each) for each in message.impairments)
    fetches = tuple(
        record_of(types.FetchInfo, each, model=f"{each.model}:{each.model_version}")
        for each in message.fetches
    )
    return record_of(types.AgentInfo, message, impairments=impairments, fetches=fetches)


def _impairment(message: admin_pb2.AgentImpairment) -> types.AgentImpairment:
    remaining_s = message.remaining_ns / 1e9 if message.remaining_ns else None
    return record_of(types.AgentImpairment, message, remaining_s=remaining_s)


def active_plan(message: admin_pb2.GetPlanResponse) -> types.ActivePlan:
    """Returns the plan in force in a reply; its document is empty without a plan."""
    try:
        document = json.loads(message.plan_json or "{}")
    except ValueError as error:
        raise ProtocolError("the server's plan is no JSON") from error
    if not isinstance(document, dict):
        raise ProtocolError("the server's plan is no JSON object")
    return types.ActivePlan(
        document,
        message.explanation,
        message.plan_id,
        message.planner,
        plan_switch(message.last_switch) if message.HasField("last_switch") else None,
    )


def replanned(message: admin_pb2.ReplanResponse) -> types.Replanned:
    """Returns the result of planning anew in a reply."""
    switch = plan_switch(message.plan_switch) if message.HasField("plan_switch") else None
    return types.Replanned(message.plan_id, message.changed, switch)


def plan_switch(message: admin_pb2.PlanSwitch) -> types.PlanSwitch:
    """Returns one change of plan."""
    return record_of(types.PlanSwitch, message)


def trace(message: admin_pb2.GetTraceResponse) -> types.Trace:
    """Returns a request's trace, spans in the server's order: by attempt, then by hop."""
    return record_of(types.Trace, message)


def plan_text(document: Mapping[str, Any]) -> str:
    """Returns a plan document as the JSON text the server reads."""
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise InvalidInputError.at("document", f"is no JSON: {error}") from error
