"""The check of bytes believes nothing that the check of messages would not, whatever they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
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
from catenary_services.rules import checker_of, parsed
from catenary_services.rules.checking import checked
from catenary_services.rules.walking import COMPILED, walk_of
from hostile.any_message import good_messages, message_types, messages

pytestmark = pytest.mark.skipif(not COMPILED, reason="the walk was not built (make native)")

TYPES = message_types()
HOP = common_pb2.Hop(agent_id="agent-0", model="toy", model_version="1", last_block=4)
HEADER = frame_pb2.FrameHeader(
    kind=1,
    epoch=3,
    batch_id=1 << 40,
    batch_rows=2,
    rows=2,
    position=1,
    budget_ns=-5,
    slices=[common_pb2.Slice(gateway_id="gateway-0", request_id=1, rows=2)],
    route=[HOP, HOP],
    plan_id="plan é",
    sent_monotonic_ns=10**15,
    timings=[common_pb2.HopTiming(agent_id="agent-0", last_block=4, compute_ns=10**6)],
    tensors=[frame_pb2.TensorHeader(name="x", datatype="FP32", shape=[2, 4], nbytes=32)],
    session_rows=[frame_pb2.SessionRows(session_id=1, position=2, tokens=3, sample=True)],
)


def believed(descriptor: Descriptor, data: bytes) -> bool:
    walk = walk_of(descriptor)
    assert walk is not None
    return walk(data)


def require_true(descriptor: Descriptor, data: bytes) -> bool:
    """Fails if what is believed cannot be; returns whether it was believed."""
    if not believed(descriptor, data):
        return False
    try:
        message = GetMessageClass(descriptor).FromString(data)
    except DecodeError:
        return True  # the parser refuses it; there is no message
    checker = checker_of(descriptor)
    assert checker.passes(message), (descriptor.full_name, data)
    assert checker.violation(message) is None, (descriptor.full_name, data)
    return True


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def key(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def text(number: int, value: bytes) -> bytes:
    return key(number, 2) + varint(len(value)) + value


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Returns bytes with some changed, cut, added, or written twice."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(6)
        if kind == 0:
            made[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1 and made:
            made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del made[at : at + chance.randint(1, 8)]
        elif kind == 3:
            made[at:at] = b"\xff" * chance.randint(1, 11)
        elif kind == 4:
            del made[at:]
        else:
            begin = chance.randrange(len(made) + 1)
            made[at:at] = made[begin : begin + chance.randint(1, 16)]
    return bytes(made)


def mutate(samples: list[tuple[Descriptor, bytes]], times: int, seed: int) -> int:
    """Holds so many mutations of messages to the truth; returns how many were believed."""
    chance = random.Random(seed)
    count = 0
    for _ in range(times):
        descriptor, data = chance.choice(samples)
        count += require_true(descriptor, mutated(chance, data))
    return count


@given(st.sampled_from(TYPES).flatmap(lambda kind: st.one_of(messages(kind), good_messages(kind))))
@settings(max_examples=500, deadline=None)
def test_bytes_are_believed_just_when_their_message_is(message: Any) -> None:
    data = message.SerializeToString()
    assert believed(message.DESCRIPTOR, data) == checker_of(message.DESCRIPTOR).passes(message)
    require_true(message.DESCRIPTOR, data)


@pytest.mark.parametrize("descriptor", TYPES, ids=lambda each: each.full_name)
def test_what_is_within_its_bounds_is_believed_at_once(descriptor: Descriptor) -> None:
    @given(good_messages(descriptor))
    @settings(max_examples=15, deadline=None)
    def look(message: Any) -> None:
        assert checker_of(descriptor).violation(message) is None
        assert believed(descriptor, message.SerializeToString()), message

    look()


@given(st.sampled_from(TYPES), st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_noise_is_never_believed_wrongly(descriptor: Descriptor, data: bytes) -> None:
    require_true(descriptor, data)


@given(
    st.lists(st.sampled_from(TYPES).flatmap(good_messages), min_size=1, max_size=8), st.integers()
)
@settings(max_examples=100, deadline=None)
def test_changed_bytes_are_never_believed_wrongly(good: list[Any], seed: int) -> None:
    samples = [(each.DESCRIPTOR, each.SerializeToString()) for each in good]
    mutate([*samples, (HEADER.DESCRIPTOR, HEADER.SerializeToString())], 50, seed)


def test_every_beginning_of_a_message_is_looked_at_to_its_end_only() -> None:
    data = HEADER_BYTES
    assert believed(HEADER.DESCRIPTOR, data)
    count = sum(require_true(HEADER.DESCRIPTOR, data[:end]) for end in range(len(data)))
    assert 0 < count < len(data) // 4  # only where a field ends


HEADER_BYTES = HEADER.SerializeToString()
_HOP = HOP.SerializeToString()
DOUBTED: dict[str, tuple[Descriptor, bytes]] = {
    "a field twice": (HEADER.DESCRIPTOR, HEADER_BYTES + b"\x08\x01"),
    "a message twice": (
        scheduler_pb2.PartitionFailed.DESCRIPTOR,
        text(2, b"") + text(2, b""),
    ),
    "two of a oneof": (scheduler_pb2.AgentMessage.DESCRIPTOR, text(2, b"") + text(7, b"")),
    "a group": (HEADER.DESCRIPTOR, HEADER_BYTES + key(100, 3) + key(100, 4)),
    "an unknown kind of value": (HEADER.DESCRIPTOR, HEADER_BYTES + key(100, 6)),
    "field 0": (HEADER.DESCRIPTOR, HEADER_BYTES + b"\x00\x00"),
    "a field beyond all": (HEADER.DESCRIPTOR, HEADER_BYTES + varint(1 << 32) + b"\x00"),
    "another way to write it": (HEADER.DESCRIPTOR, HEADER_BYTES[2:] + key(1, 5) + b"\x01\0\0\0"),
    "a number of eleven bytes": (
        HEADER.DESCRIPTOR,
        HEADER_BYTES + key(100, 0) + b"\x80" * 10 + b"\x01",
    ),
    "a number of 65 bits": (
        scheduler_pb2.ReportHoldings.DESCRIPTOR,
        b"\x08" + b"\xff" * 9 + b"\x02",
    ),
    "a number that would be cut": (common_pb2.Slice.DESCRIPTOR, b"\x20" + varint((1 << 32) + 1)),
    "one too far below zero, zigzag": (
        admin_pb2.Booking.DESCRIPTOR,
        b"\x20" + varint(2 * 9007199254740992 - 1),
    ),
    "a number that does not end": (common_pb2.Slice.DESCRIPTOR, b"\x20\x80"),
    "a text longer than all": (common_pb2.Slice.DESCRIPTOR, b"\x0a\x05abcd"),
    "a text of 2^64-1": (common_pb2.Slice.DESCRIPTOR, b"\x0a" + varint(2**64 - 1) + b"a"),
    "an unknown text of 2^63": (common_pb2.Slice.DESCRIPTOR, key(99, 2) + varint(2**63)),
    "half of a number": (
        scheduler_pb2.GenerationCost.DESCRIPTOR,
        key(7, 1) + b"\0\0\0\0",
    ),
    "no number": (
        scheduler_pb2.GenerationCost.DESCRIPTOR,
        key(7, 1) + b"\0\0\0\0\0\0\xf8\x7f",
    ),
    "a name with é": (common_pb2.Slice.DESCRIPTOR, text(1, "é".encode())),
    "a name with half of é": (common_pb2.Slice.DESCRIPTOR, text(1, "é".encode()[:1])),
    "a name that goes on with a line": (common_pb2.Slice.DESCRIPTOR, text(1, b"a\n")),
    "a label with a separator of lines": (
        scheduler_pb2.DispatchBatch.DESCRIPTOR,
        text(3, "a\u2028".encode()),
    ),
    "packed numbers, the last cut": (
        frame_pb2.TensorHeader.DESCRIPTOR,
        text(3, b"\x01\x80") + b"\x20\x01",
    ),
    "packed numbers, too many": (frame_pb2.TensorHeader.DESCRIPTOR, text(3, b"\x01" * 33)),
    "numbers one by one, too many": (frame_pb2.TensorHeader.DESCRIPTOR, b"\x18\x01" * 33),
    "packed and one by one, too many": (
        frame_pb2.TensorHeader.DESCRIPTOR,
        text(3, b"\x01" * 32) + b"\x18\x01",
    ),
    "messages, too many": (HEADER.DESCRIPTOR, HEADER_BYTES + text(8, _HOP) * 255),
    "a sum beyond what is there": (
        scheduler_pb2.DispatchBatch.DESCRIPTOR,
        b"\x20\x02"
        + text(5, common_pb2.Slice(batch_row=1, rows=1).SerializeToString())
        + text(5, common_pb2.Slice(batch_row=2, rows=1).SerializeToString()),
    ),
    "another name than the one above": (
        scheduler_pb2.GatewayHello.DESCRIPTOR,
        text(1, b"gateway-0") + text(3, text(1, b"gateway-1")),
    ),
}


@pytest.mark.parametrize(("descriptor", "data"), DOUBTED.values(), ids=DOUBTED)
def test_what_may_be_understood_otherwise_is_doubted(descriptor: Descriptor, data: bytes) -> None:
    assert not believed(descriptor, data)


BELIEVED: dict[str, tuple[Descriptor, bytes]] = {
    "fields of a later version": (
        HEADER.DESCRIPTOR,
        HEADER_BYTES
        + key(900, 0)
        + b"\xff" * 9
        + b"\x01"
        + text(1 << 20, b"later") * 2
        + key(5_000, 1)
        + bytes(8)
        + key(101, 5)
        + bytes(4),
    ),
    "packed numbers in pieces": (
        frame_pb2.TensorHeader.DESCRIPTOR,
        text(3, b"\x01" * 31) + b"\x18\x01" + text(3, b""),
    ),
    "a number with zeros in front": (common_pb2.Slice.DESCRIPTOR, b"\x20\x81\x80\x80\x00"),
    "a number below zero": (
        frame_pb2.FrameHeader.DESCRIPTOR,
        b"\x08\x01\x58" + varint(2**64 - 9),
    ),
    "one below zero, zigzag": (
        admin_pb2.Booking.DESCRIPTOR,
        b"\x20" + varint(2 * 9007199254740991 - 1),
    ),
    "a label with é": (scheduler_pb2.DispatchBatch.DESCRIPTOR, text(3, "plan é".encode())),
    "a text of as many characters as it may have": (
        scheduler_pb2.DispatchBatch.DESCRIPTOR,
        text(3, "é".encode() * 1_024),
    ),
    "sums that are all there is": (
        scheduler_pb2.DispatchBatch.DESCRIPTOR,
        text(5, common_pb2.Slice(batch_row=1, rows=1).SerializeToString()) + b"\x20\x02",
    ),
    "the same name in both": (
        scheduler_pb2.GatewayHello.DESCRIPTOR,
        text(3, text(1, b"gateway-0")) + text(1, b"gateway-0"),
    ),
    "no answer yet": (
        scheduler_pb2.SubmitSession.DESCRIPTOR,
        scheduler_pb2.SubmitSession(model="m", prompt_tokens=1, max_tokens=1).SerializeToString(),
    ),
    "a seed of all bits": (
        generation_pb2.SamplingParameters.DESCRIPTOR,
        b"\x40" + varint(2**64 - 1),
    ),
}


@pytest.mark.parametrize(("descriptor", "data"), BELIEVED.values(), ids=BELIEVED)
def test_what_has_one_meaning_is_believed(descriptor: Descriptor, data: bytes) -> None:
    assert require_true(descriptor, data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_walked_and_nothing_else(kind: Callable[[bytes], Any]) -> None:
    walk: Any = walk_of(HEADER.DESCRIPTOR)
    assert walk(kind(HEADER_BYTES))
    with pytest.raises(TypeError):
        walk("text")


def test_no_enum_forgets_values_it_does_not_know() -> None:
    """A closed one would: what was believed would not be what is read."""
    fields = [field for each in TYPES for field in each.fields]
    assert not any(field.enum_type.is_closed for field in fields if field.enum_type is not None)
    assert all(field.type != FieldDescriptor.TYPE_GROUP for field in fields)


def test_what_is_doubted_is_looked_at_and_named() -> None:
    twice = HEADER_BYTES + b"\x08\x02"
    assert not believed(HEADER.DESCRIPTOR, twice)
    assert parsed(frame_pb2.FrameHeader, twice).kind == 2
    wrong = HEADER_BYTES + b"\x08\x00"
    with pytest.raises(InvalidMessage, match=r"FrameHeader\.kind"):
        parsed(frame_pb2.FrameHeader, wrong)
    read = checked(frame_pb2.FrameHeader.FromString)
    assert read is not None
    assert read(twice).kind == 2
    assert isinstance(read(wrong), InvalidMessage)
    with pytest.raises(DecodeError):
        read(text(12, b"\xff"))
