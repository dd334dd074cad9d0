"""Configuration and statistics of models as messages, and messages as documents for HTTP."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from catenary_gateway.catalog import Model
from catenary_gateway.observability.totals import BatchTotals, DurationSum, ModelTotals
from catenary_gateway.tensors.json_documents import Document
from catenary_gateway.tensors.validation import MAX_ROWS
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.domain.tensors import BYTES, TensorSpec

_BACKENDS = {"onnxruntime_onnx": "onnxruntime", "pytorch_exported": "pytorch"}
_NANOSECONDS_PER_MILLISECOND = 1_000_000


def config_of(model: Model, max_request_bytes: int) -> oip.ModelConfig:
    """Returns the configuration of a model whose requests may have so many bytes."""
    rows = 0
    if model.batched and model.inputs:
        rows = MAX_ROWS
        if model.max_row_bytes:
            rows = max(1, min(rows, max_request_bytes // model.max_row_bytes))
    first = 1 if rows else 0
    return oip.ModelConfig(
        name=model.key.name,
        platform=model.platform,
        backend=_BACKENDS.get(model.platform, model.platform),
        max_batch_size=rows,
        input=[
            oip.ModelInput(name=spec.name, data_type=_data_type(spec), dims=spec.shape[first:])
            for spec in model.inputs
        ],
        output=[
            oip.ModelOutput(name=spec.name, data_type=_data_type(spec), dims=spec.shape[first:])
            for spec in model.outputs
        ],
        dynamic_batching=oip.ModelDynamicBatching() if rows else None,
    )


def statistics_of(
    model: Model, totals: ModelTotals, counts: tuple[int, int]
) -> oip.ModelStatistics:
    """Returns the statistics of a model.

    Args:
        model: The model.
        totals: Sums over its finished requests.
        counts: Number of its requests that were answered, and of those that were not.
    """
    answered, failed = counts
    requests = totals.requests
    return oip.ModelStatistics(
        name=model.key.name,
        version=model.key.version,
        last_inference=totals.latest_unix_ns // _NANOSECONDS_PER_MILLISECOND,
        inference_count=totals.rows,
        execution_count=totals.batches,
        inference_stats=oip.InferStatistics(
            success=oip.StatisticDuration(count=answered, ns=totals.answered_ns),
            fail=oip.StatisticDuration(count=failed, ns=totals.failed_ns),
            queue=_duration(totals.queue),
            compute_input=_duration(requests.input),
            compute_infer=_duration(requests.compute),
            compute_output=_duration(requests.output),
        ),
        batch_stats=[
            _batch_statistics(size, sums) for size, sums in sorted(totals.of_batch_size.items())
        ],
    )


def document_of(message: Message) -> Document:
    """Returns a message as a JSON document with the names of its fields.

    Numbers are numbers, also those of 64 bits, and only messages that are not set are left out.
    """
    document: Document = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            document[field.name] = [_value(field, each) for each in value]
        elif field.message_type is None or message.HasField(field.name):
            document[field.name] = _value(field, value)
    return document


def _value(field: Any, value: object) -> object:
    if isinstance(value, Message):
        return document_of(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


def _data_type(spec: TensorSpec) -> oip.DataType.ValueType:
    name = "STRING" if spec.datatype == BYTES else spec.datatype
    return oip.DataType.Value(f"TYPE_{name}")


def _duration(total: DurationSum) -> oip.StatisticDuration:
    return oip.StatisticDuration(count=total.count, ns=total.total_ns)


def _batch_statistics(size: int, totals: BatchTotals) -> oip.InferBatchStatistics:
    return oip.InferBatchStatistics(
        batch_size=size,
        compute_input=_duration(totals.input),
        compute_infer=_duration(totals.compute),
        compute_output=_duration(totals.output),
    )
