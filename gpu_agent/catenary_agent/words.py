"""Sets of names written as text, several to a line."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
