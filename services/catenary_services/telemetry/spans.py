"""Spans and their places in traces, as processes tell each other of them and export them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

AttributeValue = str | bool | int | float | tuple[str, ...]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLAGS_AT = 54
"""Index of the second digit of the flags in a traceparent of any version."""
_SAMPLED_DIGITS = frozenset("13579bdf")


class TraceContext(msgspec.Struct, frozen=True):
    """A span's place in a trace: ids and sampling decision, which travel between processes."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The W3C form of the context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """Returns the context of a new span below this one."""
        return TraceContext(self.trace_id, new_id(64), self.sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """Returns the context, or None if `text` is not a valid traceparent."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    release, trace, span, flags, rest = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    # Version 00 has nothing behind the flags; later ones may. ff and zero ids are invalid.
    if release == "ff" or (release == "00" and rest) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def is_sampled(traceparent: str) -> bool:
    """True if the sampled flag is set. Nothing else is validated: the text comes from a peer."""
    return len(traceparent) > _FLAGS_AT and traceparent[_FLAGS_AT] in _SAMPLED_DIGITS


class RecordedSpan(NamedTuple):
    """A span that has ended, to be exported."""

    context: TraceContext
    parent_span_id: int | None
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, AttributeValue]
    error: str | None
    links: Sequence[TraceContext]
    is_call: bool
    """Whether it is a call that this process answers."""


def new_id(bits: int) -> int:
    """Returns an id of a trace or a span, which is never 0."""
    return random.getrandbits(bits) or 1
