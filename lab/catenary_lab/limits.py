"""Figures of benches and scenarios beside their limits, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict


class Figure(TypedDict):
    """A measurement; `limit` is None if none is promised."""

    name: str
    value: float
    unit: str
    limit: float | None
    ok: bool


def at_most(name: str, value: float, unit: str, limit: float | None = None) -> Figure:
    """Returns a figure that must not exceed `limit`."""
    return Figure(
        name=name, value=value, unit=unit, limit=limit, ok=limit is None or value <= limit
    )


def at_least(name: str, value: float, unit: str, limit: float) -> Figure:
    """Returns a figure that must reach `limit`."""
    return Figure(name=name, value=value, unit=unit, limit=limit, ok=value >= limit)


def table(figures: Iterable[Mapping[str, Any]]) -> str:
    """Returns the figures as aligned text, one a line."""
    lines = []
    for figure in figures:
        limit = "" if figure["limit"] is None else f"limit {figure['limit']:g}"
        verdict = "" if figure["limit"] is None else ("ok" if figure["ok"] else "MISSED")
        lines.append(
            f"{figure['name']:<62} {figure['value']:>11.3f} {figure['unit']:<10}"
            f" {limit:<12} {verdict}".rstrip()
        )
    return "\n".join(lines)
