from __future__ import annotations

import pytest

from catenary_agent.generation.frames.members import Members
from catenary_protos.catenary.v1 import common_pb2, frame_pb2
from catenary_services.transport.interface import NOBODY, Sender

Move = frame_pb2.SessionMove
OLD, NEW = ("o-0", "o-1"), ("n-0", "n-1")


def opening(*agents: str, gateway: str = "gw") -> frame_pb2.SessionOpening:
    hops = [common_pb2.Hop(agent_id=agent) for agent in agents]
    return frame_pb2.SessionOpening(gateway_id=gateway, route=hops)


def rows(session: int, *agents: str) -> frame_pb2.FrameHeader:
    entry = frame_pb2.SessionRows(session_id=session, tokens=1)
    if agents:
        entry.opening.CopyFrom(opening(*agents))
    kind = frame_pb2.FRAME_KIND_SESSION_STEP
    return frame_pb2.FrameHeader(kind=kind, session_rows=[entry])


def token(session: int) -> frame_pb2.FrameHeader:
    entry = frame_pb2.SessionToken(session_id=session)
    kind = frame_pb2.FRAME_KIND_SESSION_TOKENS
    return frame_pb2.FrameHeader(kind=kind, session_tokens=[entry])


def cache(session: int) -> frame_pb2.FrameHeader:
    part = frame_pb2.SessionCache(session_id=session)
    return frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_SESSION_CACHE, cache=part)


def move(step: int, said_by: str = "", **changes: object) -> frame_pb2.FrameHeader:
    made = Move(session_id=2, moved_session_id=1, step=step, agent_id=said_by, **changes)
    return frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_SESSION_MOVE, move=made)


@pytest.fixture
def members() -> Members:
    """Of an agent on the old ring, which has session 1."""
    made = Members()
    made.note(1, opening(*OLD))
    return made


@pytest.mark.parametrize("frame", [rows(1), token(1), cache(1), rows(1, "stranger")])
def test_only_members_and_the_gateway_speak_of_a_session(
    members: Members, frame: frame_pb2.FrameHeader
) -> None:
    """An opening that names others changes nothing once the session is known."""
    for name in (*OLD, "gw"):
        assert members.admits(frame, Sender(name))
    assert not members.admits(frame, Sender("stranger"))
    assert members.admits(frame, NOBODY)  # made in this process


def test_who_is_no_part_of_a_session_cannot_open_it(members: Members) -> None:
    assert members.admits(rows(5, *OLD), Sender("o-1"))
    assert members.admits(rows(5, *OLD), Sender("gw"))
    assert not members.admits(rows(5, *OLD), Sender("stranger"))


def test_one_wrong_entry_refuses_the_frame(members: Members) -> None:
    frame = rows(1)
    members.note(7, opening("x", "y"))
    frame.session_rows.add(session_id=7, tokens=1)
    assert not members.admits(frame, Sender("o-0"))


def test_what_is_over_is_anybodys_and_ignored_later(members: Members) -> None:
    members.forget(1)
    assert members.admits(token(1), Sender("stranger"))


def test_the_new_ring_hears_the_old_one_once_the_leader_has_introduced_it() -> None:
    members = Members()
    round_0 = move(Move.STEP_ROUND, "o-0", opening=opening(*NEW), from_agent_ids=OLD)
    assert not members.admits(round_0, Sender("o-1"))  # says to be another
    assert members.admits(round_0, Sender("o-0"))
    members.note(2, opening(*NEW))
    for name in (*OLD, *NEW, "gw"):
        assert members.admits(cache(2), Sender(name))
    assert not members.admits(cache(2), Sender("stranger"))
    again = move(Move.STEP_ROUND, "stranger", opening=opening("stranger"), from_agent_ids=["s"])
    assert not members.admits(again, Sender("stranger"))
    assert not members.admits(cache(2), Sender("stranger"))


def test_the_old_ring_hears_the_new_one_once_the_gateway_has_ordered_the_move(
    members: Members,
) -> None:
    ready = move(Move.STEP_READY, "n-1")
    assert not members.admits(ready, Sender("n-1"))
    begin = move(Move.STEP_BEGIN, opening=opening(*NEW))
    assert not members.admits(begin, Sender("stranger"))
    assert not members.admits(ready, Sender("n-1"))
    assert members.admits(begin, Sender("gw"))
    assert members.admits(ready, Sender("n-1"))
    assert not members.admits(move(Move.STEP_READY, "n-1"), Sender("n-0"))  # speaks for another
    assert not members.admits(move(Move.STEP_GIVE_UP, "stranger"), Sender("stranger"))


def test_a_leader_of_an_older_release_names_nobody_and_is_believed() -> None:
    members = Members()
    assert members.admits(move(Move.STEP_ROUND, "o-0", opening=opening(*NEW)), Sender("o-0"))
    members.note(2, opening(*NEW))
    assert members.admits(cache(2), Sender("o-1"))


def test_moves_that_came_to_nothing_are_forgotten_in_the_end() -> None:
    members = Members()
    for session in range(10_000):
        begun = move(Move.STEP_ROUND, "o-0", opening=opening(*NEW), from_agent_ids=OLD)
        begun.move.session_id = session
        members.admits(begun, Sender("o-0"))
    assert len(members._moves) <= 4_096
