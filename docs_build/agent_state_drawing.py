"""Draws the states of a session at an agent as a Mermaid diagram, from the table the code uses.

`python -m docs_build.agent_state_drawing` prints the drawing of docs/agent-session-states.md; a
test compares.
"""

from __future__ import annotations

from catenary_agent.generation.state.states import CLOSED, FIRST_STATES, TRANSITIONS, SessionState


def drawing() -> str:
    """Returns the diagram: one arrow for each change in the table."""
    arrows = [f"    [*] --> {state.name}: {what}" for state, what in FIRST_STATES.items()]
    for before, following in TRANSITIONS.items():
        arrows += [
            f"    {before.name} --> {_box(state)}: {what}" for state, what in following.items()
        ]
    return "\n".join(["stateDiagram-v2", *arrows])


def _box(state: SessionState) -> str:
    return "[*]" if state is CLOSED else state.name


if __name__ == "__main__":
    print(drawing())
