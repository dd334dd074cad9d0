"""The drawings of docs/session-states.md are those of the table of transitions."""

from __future__ import annotations

import re

from catenary_scheduler.dispatch.chained.states import (
    REQUEST_TRANSITIONS,
    SESSION_TRANSITIONS,
    RequestState,
    SessionState,
)
from cluster_harness import ROOT
from docs_build.state_drawing import drawing, drawings

PAGE = (ROOT / "docs/session-states.md").read_text()


def test_the_page_draws_the_table() -> None:
    assert tuple(re.findall(r"```mermaid\n(.*?)\n```", PAGE, re.DOTALL)) == drawings()


def test_the_page_explains_every_state_that_is_drawn() -> None:
    explained = set(re.findall(r"\*\*([A-Z_]+)\*\*", PAGE))
    ends = {RequestState.NEW, RequestState.ANSWERED, SessionState.NEW, SessionState.CLOSED}
    assert explained == {
        state.name for state in (*RequestState, *SessionState) if state not in ends
    }


def test_a_drawing_holds_every_transition_from_every_source() -> None:
    for transitions in (REQUEST_TRANSITIONS, SESSION_TRANSITIONS):
        drawn = drawing(transitions)
        assert drawn.count("-->") == len(
            {(s, way.target) for way in transitions for s in way.sources}
        )
        assert all(way.name in drawn for way in transitions)
