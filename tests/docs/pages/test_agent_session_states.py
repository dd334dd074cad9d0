"""The drawing of docs/agent-session-states.md is that of the agent's table of transitions."""

from __future__ import annotations

import re

from catenary_agent.generation.state.states import FIRST_STATES, TRANSITIONS, SessionState
from cluster_harness import ROOT
from docs_build.agent_state_drawing import drawing

PAGE = (ROOT / "docs/agent-session-states.md").read_text()


def test_the_page_draws_the_table() -> None:
    assert re.findall(r"```mermaid\n(.*?)\n```", PAGE, re.DOTALL) == [drawing()]


def test_the_page_explains_every_state_that_is_drawn() -> None:
    explained = re.findall(r"^\* \*\*([A-Z_]+)\*\*", PAGE, re.MULTILINE)
    assert explained == [state.name for state in SessionState if state is not SessionState.CLOSED]


def test_the_drawing_has_one_arrow_for_each_change() -> None:
    changes = sum(len(following) for following in TRANSITIONS.values())
    assert drawing().count("-->") == len(FIRST_STATES) + changes
    assert set(TRANSITIONS) == set(SessionState)
