"""Messages of any type, made from its descriptor: what a peer may send that says what it likes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import (
    admin_pb2,
    common_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
)
from services.rules.vocabulary import FLOATS, INTEGERS, is_nested

_FILES = (admin_pb2, common_pb2, frame_pb2, generation_pb2, scheduler_pb2)
_NAMES = ("", "agent-0", "gateway-0", "toy", "llm", "1", "liar", "../x", "a|b", "\x00", "n" * 5_000)
_FLOATS = (0.0, 1.5, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))


def message_types() -> list[Descriptor]:
    """Returns every type of message that processes of a cluster send each other."""

    def walk(descriptor: Descriptor) -> Iterator[Descriptor]:
        yield descriptor
        for nested in descriptor.nested_types:
            yield from walk(nested)

    tops = (each for file in _FILES for each in file.DESCRIPTOR.message_types_by_name.values())
    return [each for top in tops for each in walk(top)]


def messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Returns a strategy for messages of a type; most values are usual, some extreme."""

    @st.composite
    def make(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        fill(draw, message)
        return message

    return make()


def fill(draw: st.DrawFn, message: Message) -> None:
    """Sets some fields of a message, and of those in it; of a oneof one."""
    fields = list(message.DESCRIPTOR.fields)
    for oneof in message.DESCRIPTOR.oneofs:
        chosen = draw(st.sampled_from(list(oneof.fields)))
        fields = [f for f in fields if f.containing_oneof is not oneof or f is chosen]
    for field in fields:
        if field.containing_oneof is None and not draw(st.integers(0, 3)):
            continue
        if not field.is_repeated:
            if is_nested(field):
                getattr(message, field.name).SetInParent()
                fill(draw, getattr(message, field.name))
            else:
                setattr(message, field.name, draw(_values(field)))
            continue
        for _ in range(draw(st.integers(0, 2))):
            if is_nested(field):
                fill(draw, getattr(message, field.name).add())
            else:
                getattr(message, field.name).append(draw(_values(field)))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in FLOATS:
        return st.sampled_from(_FLOATS)
    if field.type in INTEGERS:
        low, high = INTEGERS[field.type]
        usual = st.integers(0, 8)
        return st.one_of(usual, usual, usual, st.sampled_from((low, high, high // 2 + 1)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    return st.sampled_from(_NAMES)
