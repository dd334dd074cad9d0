"""Every field has a rule, and messages are held to all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import (
    admin_pb2,
    common_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
)
from catenary_services.errors import InvalidMessage
from catenary_services.rules import bounds_of, check, checker_of, parsed
from catenary_services.rules.relations import RELATIONS
from catenary_services.rules.vocabulary import FLOATS, INTEGERS, TEXTS, lowest
from hostile.any_message import message_types, messages

TYPES = message_types()
DAY_NS = 86_400 * 10**9
KEY = scheduler_pb2.PartitionKey(model="m", model_version="1", last_block=4)
HOP = common_pb2.Hop(agent_id="a", model="m", model_version="1", last_block=4)
PEER = common_pb2.Peer(peer_id="a")


def submit(**changes: Any) -> scheduler_pb2.SubmitRequest:
    known = {"request_id": 1, "model": "m", "rows": 2, "budget_ns": 10**9}
    return scheduler_pb2.SubmitRequest(**{**known, **changes})


def session(**changes: Any) -> scheduler_pb2.SubmitSession:
    known = {"model": "m", "prompt_tokens": 8, "max_tokens": 4, "waited_ns": 100}
    return scheduler_pb2.SubmitSession(**{**known, **changes})


def progress(**values: int) -> scheduler_pb2.SessionProgress:
    return scheduler_pb2.SessionProgress(**values)


def report(**changes: Any) -> scheduler_pb2.StageReport:
    return scheduler_pb2.StageReport(**{"batch_id": 1, "compute_ns": 10**6, "rows": 1, **changes})


def hello(**changes: Any) -> scheduler_pb2.AgentHello:
    known = {"agent_id": "a", "peer": PEER, "link_bytes_per_second": 10**9, "device": "cuda:0"}
    return scheduler_pb2.AgentHello(**{**known, **changes})


def dispatch(**changes: Any) -> scheduler_pb2.DispatchBatch:
    known = {"epoch": 1, "batch_id": 1 << 40, "batch_rows": 2, "route": [HOP]}
    return scheduler_pb2.DispatchBatch(**{**known, **changes})


def piece(**changes: Any) -> common_pb2.Slice:
    return common_pb2.Slice(**{"gateway_id": "g", "request_id": 1, "rows": 1, **changes})


def header(**changes: Any) -> frame_pb2.FrameHeader:
    return frame_pb2.FrameHeader(
        **{"kind": 1, "epoch": 1, "batch_id": 1, "route": [HOP], **changes}
    )


def generated(**changes: Any) -> scheduler_pb2.GenerationReport:
    known = {"key": KEY, "decode_steps": 4, "decode_rows": 8, "decode_ns": 100}
    return scheduler_pb2.GenerationReport(**{**known, **changes})


def cost(value: float) -> scheduler_pb2.PartitionLoaded:
    costs = scheduler_pb2.GenerationCost(decode_context_token_ns=value)
    return scheduler_pb2.PartitionLoaded(key=KEY, generation=costs)


WRONG = [
    (submit(rows=0), "SubmitRequest.rows"),
    (submit(rows=1 << 21), "SubmitRequest.rows"),
    (submit(request_id=1 << 63), "SubmitRequest.request_id"),
    (submit(budget_ns=1 << 63), "SubmitRequest.budget_ns"),
    (submit(model=""), "SubmitRequest.model"),
    (submit(model="../m"), "SubmitRequest.model"),
    (submit(model="m\n"), "SubmitRequest.model"),
    (submit(model="m" * 129), "SubmitRequest.model"),
    (submit(traceparent="z" * 55), "SubmitRequest.traceparent"),
    (
        submit(in_flight=[scheduler_pb2.InFlight(batch_id=1, request_row=1, rows=2)]),
        "SubmitRequest.in_flight",
    ),
    (session(prompt_tokens=0), "SubmitSession.prompt_tokens"),
    (session(max_tokens=0), "SubmitSession.max_tokens"),
    (session(first_token_slo_ns=2**64 - 1), "SubmitSession.first_token_slo_ns"),
    (session(per_token_slo_ns=200 * DAY_NS), "SubmitSession.per_token_slo_ns"),
    (session(waited_ns=1 << 63), "SubmitSession.waited_ns"),
    (session(progress=progress(generated_tokens=5)), "SubmitSession.progress.generated_tokens"),
    (
        session(progress=progress(generated_tokens=1, first_token_ns=101)),
        "SubmitSession.progress.decode_ns",
    ),
    (report(compute_ns=1 << 60), "StageReport.compute_ns"),
    (report(position=256), "StageReport.position"),
    (hello(agent_id=""), "AgentHello.agent_id"),
    (hello(agent_id="a|b"), "AgentHello.agent_id"),
    (hello(agent_id="b"), "AgentHello.peer.peer_id"),
    (hello(link_bytes_per_second=0), "AgentHello.link_bytes_per_second"),
    (hello(memory_bytes=1 << 60), "AgentHello.memory_bytes"),
    (scheduler_pb2.AgentHello(agent_id="a", link_bytes_per_second=1), "AgentHello.peer"),
    (dispatch(epoch=1 << 40), "DispatchBatch.epoch"),
    (dispatch(slices=[piece(batch_row=2)]), "DispatchBatch.slices"),
    (dispatch(route=[HOP] * 257), "DispatchBatch.route"),
    (header(kind=0), "FrameHeader.kind"),
    (header(budget_ns=-(1 << 60)), "FrameHeader.budget_ns"),
    (header(position=256), "FrameHeader.position"),
    (header(tensors=[frame_pb2.TensorHeader(shape=[1] * 33)]), "TensorHeader.shape"),
    (header(tensors=[frame_pb2.TensorHeader(shape=[-1])]), "TensorHeader.shape"),
    (header(cache=frame_pb2.SessionCache(first_token=2, last_token=1)), "SessionCache.last_token"),
    (
        scheduler_pb2.SessionsProgressed(sessions=[progress(decode_ns=1 << 63)]),
        "SessionProgress.decode_ns",
    ),
    (generated(lone_steps=5), "GenerationReport.lone_steps"),
    (
        generated(key=scheduler_pb2.PartitionKey(model="m", model_version="1")),
        "PartitionKey.last_block",
    ),
    (cost(math.nan), "GenerationCost.decode_context_token_ns"),
    (cost(math.inf), "GenerationCost.decode_context_token_ns"),
    (cost(-1.0), "GenerationCost.decode_context_token_ns"),
    (scheduler_pb2.PartitionLoaded(key=KEY, compute_ns=[1, 1 << 60]), "PartitionLoaded.compute_ns"),
    (scheduler_pb2.SessionsClosed(session_ids=[1, 1 << 63]), "SessionsClosed.session_ids"),
    (
        scheduler_pb2.AgentMessages(
            messages=[scheduler_pb2.AgentMessage(stage_report=report(batch_id=1 << 63))]
        ),
        "StageReport.batch_id",
    ),
    (admin_pb2.DrainAgentRequest(), "DrainAgentRequest.agent_id"),
]


def has_rule(field: FieldDescriptor) -> bool:
    """True if a field's rules leave no value to chance.

    A truth value has two values, and a message is checked by its own rules; all else needs a bound,
    or a reason for none.
    """
    bounds = bounds_of(field)
    if field.is_repeated and bounds.max_items is None:
        return False
    if field.type in (field.TYPE_BOOL, field.TYPE_MESSAGE) or bounds.unbounded:
        return True
    if field.type in TEXTS:
        return bounds.max_len is not None
    own = INTEGERS.get(field.type, (-math.inf, math.inf))
    return (bounds.low, bounds.high) != own and math.isfinite(bounds.high)


@pytest.mark.parametrize("descriptor", TYPES, ids=lambda each: each.full_name)
def test_every_field_has_a_rule_or_a_reason_for_none(descriptor: Descriptor) -> None:
    assert [field.name for field in descriptor.fields if not has_rule(field)] == []


def test_no_message_holds_one_of_its_own_type() -> None:
    def depth(descriptor: Descriptor, above: tuple[str, ...] = ()) -> int:
        assert descriptor.full_name not in above
        inner = [field.message_type for field in descriptor.fields if field.message_type]
        return 1 + max((depth(each, (*above, descriptor.full_name)) for each in inner), default=0)

    assert max(depth(descriptor) for descriptor in TYPES) <= 8


def test_relations_are_those_of_messages_there_are() -> None:
    assert set(RELATIONS) <= {descriptor.full_name for descriptor in TYPES}


@pytest.mark.parametrize(("message", "place"), WRONG, ids=lambda each: str(each)[:60])
def test_what_cannot_be_is_named(message: Any, place: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        check(message)
    assert caught.value.details["field"] == place
    assert caught.value.message.startswith(f"{place}: ")


def test_what_is_as_it_should_be_passes() -> None:
    for message in (
        submit(),
        submit(model_version=""),
        session(),
        session(progress=progress()),
        report(),
        hello(),
        dispatch(slices=[piece(), piece(batch_row=1)]),
        header(position=1),
        generated(),
        cost(0.5),
        common_pb2.Failure(),
        scheduler_pb2.AgentMessage(),
        scheduler_pb2.Heartbeat(),
        generation_pb2.SamplingParameters(),
        generation_pb2.SamplingParameters(seed=2**64 - 1),
    ):
        checker = checker_of(message.DESCRIPTOR)
        assert checker.violation(message) is None
        assert checker.passes(message)


def test_kinds_that_a_newer_process_adds_pass() -> None:
    newer = scheduler_pb2.AgentMessage.FromString(b"\xf2\x06\x00")  # field 110
    check(newer)
    check(scheduler_pb2.SessionMoved(mode=7))  # type: ignore[arg-type]


def test_a_name_that_was_good_once_is_only_looked_up_and_never_with_a_bad_one() -> None:
    for _ in range(3):
        check(submit(model="fine"))
        with pytest.raises(InvalidMessage):
            check(submit(model="not fine"))


def test_what_is_remembered_of_names_is_bounded() -> None:
    for number in range(10_000):
        check(submit(model=f"m{number}"))
    with pytest.raises(InvalidMessage):
        check(submit(model="m 1"))


def test_bytes_that_are_no_message_are_no_message() -> None:
    with pytest.raises(InvalidMessage, match="FrameHeader: cannot be read"):
        parsed(frame_pb2.FrameHeader, b"\xff\xff\xff")


@given(st.sampled_from(TYPES).flatmap(messages))
@settings(max_examples=300, deadline=None)
def test_no_message_passes_that_has_trouble(message: Any) -> None:
    checker = checker_of(message.DESCRIPTOR)
    if checker.passes(message):
        assert checker.violation(message) is None


@pytest.mark.parametrize("descriptor", TYPES, ids=lambda each: each.full_name)
def test_values_beyond_each_bound_are_refused(descriptor: Descriptor) -> None:
    """By the field, whatever else is wrong with a message that has nothing but it."""
    checker = checker_of(descriptor)
    for field in descriptor.fields:
        bounds = bounds_of(field)
        beyond: list[Any] = []
        if field.type in INTEGERS:
            low, high = INTEGERS[field.type]
            beyond += [int(bounds.high) + 1] if bounds.high < high else []
            beyond += [int(lowest(bounds)) - 1] if lowest(bounds) > low else []
        elif field.type in FLOATS and not bounds.unbounded:
            beyond += [math.nan, math.inf]
        elif field.type in TEXTS and bounds.max_len is not None and bounds.max_len < 1 << 20:
            a: Any = b"a" if field.type == FieldDescriptor.TYPE_BYTES else "a"
            beyond += [a * (bounds.max_len + 1)]
        for value in beyond:
            message = GetMessageClass(descriptor)()
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
            assert not checker.passes(message), field.full_name
            assert checker.violation(message) is not None, field.full_name
