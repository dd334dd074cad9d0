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
    enrolment_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
)
from catenary_services.rules.relations import RELATIONS, SumAtMost
from catenary_services.rules.vocabulary import FLOATS, INTEGERS, TEXTS, bounds_of, is_nested, lowest

_FILES = (admin_pb2, common_pb2, enrolment_pb2, frame_pb2, generation_pb2, scheduler_pb2)
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


def good_messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Returns a strategy for messages of a type that keep every rule."""

    @st.composite
    def make(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        _fill_well(draw, message, ())
        return message

    return make()


def _fill_well(draw: st.DrawFn, message: Message, least: tuple[str, ...]) -> None:
    """Sets fields within their bounds: `least` to their least, what bounds them to its most."""
    parts, mosts = {"peer_id", *least}, set[str]()
    for relation in RELATIONS.get(message.DESCRIPTOR.full_name, ()):
        if isinstance(relation, SumAtMost):
            parts.update(part for part in relation.parts if isinstance(part, str))
            mosts.update([relation.most] if isinstance(relation.most, str) else [])
        else:
            parts.add(relation.other)
    fields = list(message.DESCRIPTOR.fields)
    for oneof in message.DESCRIPTOR.oneofs:
        chosen = draw(st.sampled_from(list(oneof.fields)))
        fields = [f for f in fields if f.containing_oneof is not oneof or f is chosen]
    for field in fields:
        bounds = bounds_of(field)
        inner = tuple(p.partition(".")[2] for p in parts if p.startswith(f"{field.name}."))
        wanted = bounds.required or field.name in parts | mosts
        if not is_nested(field):
            values = _good_values(field, field.name in parts - mosts, field.name in mosts)
            must = wanted or _needs(field)
            if field.is_repeated:
                most = min(3, bounds.max_items or 0)
                getattr(message, field.name).extend(draw(st.lists(values, max_size=most)))
            elif must or draw(st.booleans()):
                setattr(message, field.name, draw(values))
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, min(2, bounds.max_items or 0)))):
                _fill_well(draw, getattr(message, field.name).add(), inner)
        elif wanted or draw(st.booleans()):
            getattr(message, field.name).SetInParent()
            _fill_well(draw, getattr(message, field.name), inner)


def _needs(field: FieldDescriptor) -> bool:
    return field.type in INTEGERS and lowest(bounds_of(field)) > 0


def _good_values(field: FieldDescriptor, is_part: bool, is_most: bool) -> st.SearchStrategy[Any]:
    bounds = bounds_of(field)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type in FLOATS:
        if bounds.unbounded:
            return st.sampled_from(_FLOATS)
        low, high = lowest(bounds), bounds.high
        return st.sampled_from([v for v in (low, high, 0.0, 1.5) if low <= v <= high])
    if field.type in INTEGERS:
        own_low, own_high = INTEGERS[field.type]
        least, most = int(max(lowest(bounds), own_low)), int(min(bounds.high, own_high))
        if is_part or is_most:
            return st.just(most if is_most else least)
        return st.one_of(st.integers(least, most), st.sampled_from((least, most)))
    assert field.type in TEXTS
    if is_part:
        return st.just("name")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(min_size=int(bounds.required), max_size=min(64, bounds.max_len or 64))
    most = min(40, bounds.max_len or 40)
    if bounds.pattern is None:
        return st.text(min_size=int(bounds.required), max_size=most)
    text = st.from_regex(bounds.pattern, fullmatch=True)
    text = text.filter(lambda found: bounds.required <= len(found) <= most)
    return text if bounds.required else st.one_of(st.just(""), text)
