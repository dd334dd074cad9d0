from __future__ import annotations

import pytest

from catenary_agent.engine.inbound.memory import HeldBatches
from catenary_agent.generation.frames.members import FrameFilter
from catenary_agent.generation.frames.receiving import FrameReceiver
from catenary_protos.catenary.v1 import common_pb2, frame_pb2
from catenary_services.transport.interface import NOBODY, FrameSender

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


def admits(members: FrameFilter, header: frame_pb2.FrameHeader, sender: FrameSender) -> bool:
    return FrameReceiver("me", HeldBatches(0), members).admits(header, sender)


@pytest.fixture
def members() -> FrameFilter:
    """Of an agent on the old ring, which has session 1."""
    made = FrameFilter()
    made.note(1, opening(*OLD))
    return made


def test_every_kind_of_frame_that_sessions_have_is_in_the_table(members: FrameFilter) -> None:
    kinds = {
        number
        for name, number in frame_pb2.FrameKind.items()
        if name.startswith(("FRAME_KIND_SESSION_", "FRAME_KIND_CACHE_"))
    }
    assert set(FrameReceiver("me", HeldBatches(0), members).kinds) == kinds


def loan(step: int, said_by: str, session: int = 0) -> frame_pb2.FrameHeader:
    made = frame_pb2.CacheLoan(step=step, agent_id=said_by, loan_id=7, session_id=session)
    return frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_CACHE_LOAN, loan=made)


def test_members_of_a_session_offer_memory_and_nobody_speaks_for_others(
    members: FrameFilter,
) -> None:
    offer, answer = frame_pb2.CacheLoan.STEP_OFFER, frame_pb2.CacheLoan.STEP_RETURN
    assert admits(members, loan(offer, "o-1", 1), FrameSender("o-1"))
    assert not admits(members, loan(offer, "o-1", 1), FrameSender("o-0"))
    assert not admits(members, loan(offer, "stranger", 1), FrameSender("stranger"))
    assert not admits(members, loan(offer, "o-1", 5), FrameSender("o-1"))  # there is none
    assert admits(members, loan(answer, "n-0"), FrameSender("n-0"))  # the lender knows to whom
    assert not admits(members, loan(answer, "n-0"), FrameSender("n-1"))


def test_members_that_move_a_session_to_here_offer_memory() -> None:
    made = FrameFilter()
    offer, first = frame_pb2.CacheLoan.STEP_OFFER, move(Move.STEP_ROUND, "o-0")
    first.move.opening.CopyFrom(opening(*NEW))
    first.move.from_agent_ids.extend(OLD)
    assert admits(made, first, FrameSender("o-0"))
    assert admits(made, loan(offer, "o-1", 2), FrameSender("o-1"))
    assert not admits(made, loan(offer, "stranger", 2), FrameSender("stranger"))


def test_a_piece_is_lent_by_whoever_says_so(members: FrameFilter) -> None:
    part = cache(1)
    part.cache.lent.agent_id = "o-1"
    assert admits(members, part, FrameSender("o-1"))
    assert not admits(members, part, FrameSender("o-0"))


@pytest.mark.parametrize("frame", [rows(1), token(1), cache(1), rows(1, "stranger")])
def test_only_members_and_the_gateway_speak_of_a_session(
    members: FrameFilter, frame: frame_pb2.FrameHeader
) -> None:
    """An opening that names others changes nothing once the session is known."""
    for name in (*OLD, "gw"):
        assert admits(members, frame, FrameSender(name))
    assert not admits(members, frame, FrameSender("stranger"))
    assert admits(members, frame, NOBODY)  # made in this process


def test_who_is_no_part_of_a_session_cannot_open_it(members: FrameFilter) -> None:
    assert admits(members, rows(5, *OLD), FrameSender("o-1"))
    assert admits(members, rows(5, *OLD), FrameSender("gw"))
    assert not admits(members, rows(5, *OLD), FrameSender("stranger"))


def test_one_wrong_entry_refuses_the_frame(members: FrameFilter) -> None:
    frame = rows(1)
    members.note(7, opening("x", "y"))
    frame.session_rows.add(session_id=7, tokens=1)
    assert not admits(members, frame, FrameSender("o-0"))


def test_what_is_over_is_anybodys_and_ignored_later(members: FrameFilter) -> None:
    members.forget(1)
    assert admits(members, token(1), FrameSender("stranger"))


def test_the_new_ring_hears_the_old_one_once_the_leader_has_introduced_it() -> None:
    members = FrameFilter()
    round_0 = move(Move.STEP_ROUND, "o-0", opening=opening(*NEW), from_agent_ids=OLD)
    assert not admits(members, round_0, FrameSender("o-1"))  # says to be another
    assert admits(members, round_0, FrameSender("o-0"))
    members.note(2, opening(*NEW))
    for name in (*OLD, *NEW, "gw"):
        assert admits(members, cache(2), FrameSender(name))
    assert not admits(members, cache(2), FrameSender("stranger"))
    again = move(Move.STEP_ROUND, "stranger", opening=opening("stranger"), from_agent_ids=["s"])
    assert not admits(members, again, FrameSender("stranger"))
    assert not admits(members, cache(2), FrameSender("stranger"))


def test_the_old_ring_hears_the_new_one_once_the_gateway_has_ordered_the_move(
    members: FrameFilter,
) -> None:
    ready = move(Move.STEP_READY, "n-1")
    assert not admits(members, ready, FrameSender("n-1"))
    begin = move(Move.STEP_BEGIN, opening=opening(*NEW))
    assert not admits(members, begin, FrameSender("stranger"))
    assert not admits(members, ready, FrameSender("n-1"))
    assert admits(members, begin, FrameSender("gw"))
    assert admits(members, ready, FrameSender("n-1"))
    assert not admits(
        members, move(Move.STEP_READY, "n-1"), FrameSender("n-0")
    )  # speaks for another
    assert not admits(members, move(Move.STEP_GIVE_UP, "stranger"), FrameSender("stranger"))


def test_a_leader_of_an_older_release_names_nobody_and_is_believed() -> None:
    members = FrameFilter()
    assert admits(members, move(Move.STEP_ROUND, "o-0", opening=opening(*NEW)), FrameSender("o-0"))
    members.note(2, opening(*NEW))
    assert admits(members, cache(2), FrameSender("o-1"))


def test_moves_that_came_to_nothing_are_forgotten_in_the_end() -> None:
    members = FrameFilter()
    for session in range(10_000):
        begun = move(Move.STEP_ROUND, "o-0", opening=opening(*NEW), from_agent_ids=OLD)
        begun.move.session_id = session
        admits(members, begun, FrameSender("o-0"))
    assert len(members._moves) <= 4_096
