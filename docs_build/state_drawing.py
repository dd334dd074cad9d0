"""Draws states and their transitions as a Mermaid diagram, from the table that the code uses.

`python -m docs_build.state_drawing` prints the drawings of docs/session-states.md; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from catenary_scheduler.dispatch.chained.states import (
    REQUEST_TRANSITIONS,
    SESSION_TRANSITIONS,
    RequestState,
    SessionState,
    Transition,
)

_ENDS = {RequestState.NEW, RequestState.ANSWERED, SessionState.NEW, SessionState.CLOSED}


def drawing(transitions: Iterable[Transition[Any]]) -> str:
    """Returns the diagram of transitions: one arrow per pair of states, with all its causes."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for way in transitions:
        for source in way.sources:
            arrows.setdefault((_box(source), _box(way.target)), []).append(way.name)
    lines = [f"    {one} --> {other}: {', '.join(names)}" for (one, other), names in arrows.items()]
    return "\n".join(["stateDiagram-v2", *lines])


def drawings() -> tuple[str, str]:
    """Returns the diagrams of requests and of sessions."""
    return drawing(REQUEST_TRANSITIONS), drawing(SESSION_TRANSITIONS)


def _box(state: RequestState | SessionState) -> str:
    return "[*]" if state in _ENDS else state.name


if __name__ == "__main__":
    print(*drawings(), sep="\n\n")
