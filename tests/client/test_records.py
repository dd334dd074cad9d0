"""What the SDK makes of messages: fields by name, repeated ones and messages within them too."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message

from catenary import moving, recent
from catenary.records import record_of
from catenary.rpc import messages
from catenary.text import generation
from catenary.types import LatencyInfo
from catenary_protos.catenary.v1 import admin_pb2, generation_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip


def filled(message: Any, before: int = 0) -> Any:
    """Sets every field, two of each repeated one."""
    for number, field in enumerate(message.DESCRIPTOR.fields, before + 1):
        value = getattr(message, field.name)
        if field.message_type is not None:
            for each in (value.add(), value.add()) if field.is_repeated else (value,):
                filled(each, number)
        elif field.is_repeated:
            value.extend([str(number)] * 2 if field.cpp_type == field.CPPTYPE_STRING else [number])
        else:
            setattr(message, field.name, type(value)(number))
    return message


def same(record: Any, message: Any) -> bool:
    """Compares what both have; lists of them too, and what is made otherwise not at all."""
    if record is None:
        return bool(message == type(message)())
    if isinstance(message, Message) and isinstance(record, tuple):
        return record == tuple(value for _, value in message.ListFields())
    if isinstance(message, Message):
        names = [field.name for field in fields(record) if hasattr(message, field.name)]
        return bool(names) and all(
            same(getattr(record, name), getattr(message, name))
            for name in names
            if name not in {"hops", "model"}
        )
    if isinstance(record, tuple):
        return len(record) == len(message) and all(map(same, record, message))
    return bool(record == message)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (messages.cluster_status, admin_pb2.GetStatusResponse()),
        (messages.trace, admin_pb2.GetTraceResponse()),
        (messages.plan_switch, admin_pb2.PlanSwitch()),
        (messages.model_metadata, oip.ModelMetadataResponse()),
        (moving.move_result, admin_pb2.MoveSessionResponse()),
        (generation.piece_of, generation_pb2.GenerateResponse()),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_every_field_is_that_of_the_message(read: Any, message: Any) -> None:
    assert same(read(message), message)
    assert same(read(filled(message)), message)


def test_lists_of_sessions_and_requests_are_read_whole() -> None:
    answer = filled(admin_pb2.ListSessionsResponse())
    for session, sent in zip(moving.session_list(answer), answer.sessions, strict=True):
        assert same(session, sent)
        assert session.model == f"{sent.model}:{sent.version}"
        (_, hop) = sent.hops
        assert session.hops[1] == (hop.agent_id, hop.first_block, hop.last_block)
    story = filled(admin_pb2.GetStoryResponse())
    assert all(map(same, moving.state_changes(story), story.changes))
    listed = filled(admin_pb2.ListRequestsResponse())
    assert all(map(same, recent.request_list(listed), listed.requests))


def test_a_message_that_is_absent_is_none() -> None:
    status = admin_pb2.GetStatusResponse()
    chain = status.models.add().chains.add()
    (model,) = messages.cluster_status(status).models
    assert (model.chains[0].lines, model.chains[0].role) == (None, "mixed")
    chain.lines.decode_ns = 5
    lines = messages.cluster_status(status).models[0].chains[0].lines
    assert lines == record_of(LatencyInfo, chain.lines)
    assert lines.decode_ns == 5
