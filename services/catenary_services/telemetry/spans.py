"""Spans that have ended, in the form in which they are exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

AttributeValue = str | bool | int | float | tuple[str, ...]


class SpanIds(Protocol):
    """The ids of a span."""

    @property
    def trace_id(self) -> int: ...

    @property
    def span_id(self) -> int: ...


class RecordedSpan(NamedTuple):
    """A span that has ended, to be exported."""

    context: SpanIds
    parent_span_id: int | None
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, AttributeValue]
    error: str | None
    links: Sequence[SpanIds]
    is_call: bool
    """Whether it is a call that this process answers."""
