"""Running sessions as data: the chains they are on, and moves to other chains. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.errors import InvalidInputError
from catenary.records import record_of
from catenary.rpc.calls import RpcCall
from catenary_protos.catenary.v1 import admin_pb2

MODES = ("auto", "kv", "tokens")
"""The ways to move a session: whichever is faster, as caches, or as tokens to compute them again.
"""
LONGEST_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session that generates text.

    Attributes:
        session_id: Id of the session, which changes when it moves or is started again.
        request_id: Id that its client sent or was given; empty if another gateway serves it.
        model: Name and version.
        chain_id: Its chain; empty for a session that an earlier scheduler began.
        hops: Agent, first block and end of the blocks it processes, in order.
        tokens: Tokens of prompt and answer, as far as known.
        gateway_id: The gateway that serves it.
        moving_to: The chain it moves to at present; empty for none.
        moving_by: "kv" or "tokens", if it moves.
        group: Its scheduler group.
        generates: Whether its prompt is done; before that it cannot move.
    """

    session_id: int
    request_id: str
    model: str
    chain_id: str
    hops: tuple[tuple[str, int, int], ...]
    tokens: int
    gateway_id: str
    moving_to: str = ""
    moving_by: str = ""
    group: int = 0
    generates: bool = True


@dataclass(frozen=True, slots=True)
class SessionMove:
    """The result of an attempt to move a session.

    Attributes:
        outcome: "moved", "begun" (nobody waited for the end), or "failed": the session stays where
            it was, or has ended.
        session_id: Its new id.
        chain_id: The chain it moved to.
        mode: "kv" or "tokens".
        tokens: Tokens cached at the hand-over.
        rounds: Rounds of sending before it.
        duration_ns: Time from the order to the hand-over.
        held_ns: The part of it in which no token was computed.
        problem: Why the move failed.
    """

    outcome: str
    session_id: int
    chain_id: str
    mode: str
    tokens: int = 0
    rounds: int = 0
    duration_ns: int = 0
    held_ns: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the state of a request, or of one of its sessions.

    Attributes:
        ago_ns: Time since then.
        event: Number of the event that caused it, counted since the scheduler leads.
        event_kind: Kind of that event, e.g. "SessionFailed".
        session_id: The session that changed; 0: the request.
        before: The state before.
        after: The state after.
        name: What happened, e.g. "session lost".
        why: Particulars, e.g. the chain or the failure; may be empty.
        answers: Number of the earlier event for which the scheduler gave the order that this event
            answers; 0: it answers no order.
    """

    ago_ns: int
    event: int
    event_kind: str
    session_id: int
    before: str
    after: str
    name: str
    why: str = ""
    answers: int = 0


def sessions(model: str) -> RpcCall[list[SessionInfo]]:
    """Returns the call that lists the sessions of a model, or of all for an empty name."""
    request = admin_pb2.ListSessionsRequest(model=model)
    return RpcCall("admin", "ListSessions", request, session_list, looks_only=True)


def story(session: int | str) -> RpcCall[list[StateChange]]:
    """Returns the call that tells the story of a session or request, given by its id.

    Raises:
        InvalidInputError: The id is empty, or is no session's.
    """
    request = admin_pb2.GetStoryRequest()
    _name(request, session)
    return RpcCall("admin", "GetStory", request, state_changes, looks_only=True)


def move_session(
    session: int | str, chain_id: str, mode: str, wait_s: float, timeout_s: float | None
) -> RpcCall[SessionMove]:
    """Returns the call that moves a session, which is given by its id or that of its request.

    Raises:
        InvalidInputError: An argument cannot be sent; the error names it.
    """
    if mode not in MODES:
        raise InvalidInputError.at("mode", f"must be one of {', '.join(MODES)}")
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise InvalidInputError.at("wait_s", f"must be in 0..{LONGEST_WAIT_S:g}")
    request = admin_pb2.MoveSessionRequest(
        chain_id=chain_id, mode="" if mode == "auto" else mode, wait_ns=round(wait_s * 1e9)
    )
    _name(request, session)
    return RpcCall("admin", "MoveSession", request, move_result, timeout_s, repeatable=False)


def _name(
    request: admin_pb2.GetStoryRequest | admin_pb2.MoveSessionRequest, session: int | str
) -> None:
    """Puts the id of a session or of a request into a message."""
    if isinstance(session, str):
        if not session:
            raise InvalidInputError.at("session", "is empty")
        request.request_id = session
    elif not 0 < session < 2**64:
        raise InvalidInputError.at("session", f"{session} is no session's id")
    else:
        request.session_id = session


def state_changes(message: admin_pb2.GetStoryResponse) -> list[StateChange]:
    """Returns the story in a reply."""
    return [record_of(StateChange, each) for each in message.changes]


def session_list(message: admin_pb2.ListSessionsResponse) -> list[SessionInfo]:
    """Returns the sessions in a reply."""
    return [
        record_of(
            SessionInfo,
            each,
            model=f"{each.model}:{each.version}",
            hops=tuple((hop.agent_id, hop.first_block, hop.last_block) for hop in each.hops),
        )
        for each in message.sessions
    ]


def move_result(message: admin_pb2.MoveSessionResponse) -> SessionMove:
    """Returns what came of a move."""
    return record_of(SessionMove, message)
