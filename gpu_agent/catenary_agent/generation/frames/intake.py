"""Conversion of received session frames to events. It depends on nothing but the frame."""

from __future__ import annotations

import itertools
import operator
import time
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.engine.inbound.intake import MAX_HOPS
from catenary_agent.generation.frames.wire import BFLOAT16
from catenary_agent.generation.state.events import (
    CacheArrived,
    Event,
    MoveMessage,
    PrefixConfirmed,
    RowsArrived,
    SessionOpened,
    SessionsBroken,
    TokenArrived,
)
from catenary_agent.generation.state.session import ArrivalTime, Drafts, SessionSpec, Side
from catenary_agent.kv import CacheSpan
from catenary_agent.kv.arrays import to_float32
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, DeadlineExceeded, InvalidInput, StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catenary_agent.generation.state.session import Hidden
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.transport.interface import ReceivedFrame

_SESSION_OF = operator.attrgetter("session_id")
_ROW_BYTES = np.dtype(np.float32).itemsize


def arrival(header: frame_pb2.FrameHeader, frame: ReceivedFrame) -> ArrivalTime:
    """Returns when a frame arrived, and its transfer time if sender and receiver share a clock."""
    received_ns = time.monotonic_ns()
    if frame.capabilities.same_host and 0 < header.sent_monotonic_ns <= received_ns:
        return ArrivalTime(received_ns, received_ns - header.sent_monotonic_ns)
    return ArrivalTime(received_ns)


def rows_of_payload(header: frame_pb2.FrameHeader, payload: memoryview) -> Hidden:
    """Returns a copy of the hidden states of a frame: float32 `[sum of tokens, hidden]`.

    Raises:
        InvalidInput: The payload is not that many rows of equal length, or of unknown numbers.
    """
    is_narrow = is_narrowed(header)
    tokens = sum(each.tokens for each in header.session_rows)
    if tokens == 0:
        if len(payload):
            raise InvalidInput("payload", f"{len(payload)} bytes that belong to no session")
        return np.empty((0, 0), np.float32)
    item_bytes = _ROW_BYTES // 2 if is_narrow else _ROW_BYTES
    if len(payload) == 0 or len(payload) % (tokens * item_bytes):
        raise InvalidInput("payload", f"{len(payload)} bytes are not {tokens} equal rows")
    if is_narrow:
        return to_float32(np.frombuffer(payload, np.uint16)).reshape(tokens, -1)
    return np.frombuffer(payload, np.float32).reshape(tokens, -1).copy()


def is_narrowed(header: frame_pb2.FrameHeader) -> bool:
    """Returns True if the rows of a frame are bfloat16, False if they are float32.

    Raises:
        InvalidInput: They are neither.
    """
    if header.rows_datatype not in ("", BFLOAT16):
        raise InvalidInput("rows_datatype", f"{header.rows_datatype!r} is not known here")
    return header.rows_datatype == BFLOAT16


def step_events(
    header: frame_pb2.FrameHeader,
    rows: Hidden,
    arrived: ArrivalTime,
    agent_id: str,
    epoch: int,
) -> list[Event]:
    """Returns the events of a `SESSION_STEP` frame, in its order.

    Args:
        header: Header of the frame.
        rows: The hidden states of the frame, float32 `[sum of tokens, hidden]`.
        arrived: When the frame arrived.
        agent_id: The id of this agent.
        epoch: Sessions of an older epoch may not begin here as their first hop.
    """
    events: list[Event] = []
    start = 0
    for entry in header.session_rows:
        at = arrived
        if entry.timings:
            at = ArrivalTime(arrived.received_ns, arrived.transfer_ns, tuple(entry.timings))
        if entry.HasField("opening"):
            events.append(_opened(header, entry, at, agent_id, epoch))
        if entry.tokens:
            part = rows[start : start + entry.tokens]
            start += entry.tokens
            drafts = Drafts(tuple(entry.draft_token_ids), entry.takes_drafts)
            guesses = len(drafts.tokens)
            if guesses >= entry.tokens or (guesses and not entry.sample):
                error = InvalidInput("draft_token_ids", f"{guesses} of {entry.tokens} rows")
                events.append(SessionsBroken((entry.session_id,), error, agent_id))
                continue
            token_ids = tuple(entry.token_ids)
            if guesses + len(token_ids) > entry.tokens:
                error = InvalidInput("token_ids", f"{len(token_ids)} of {entry.tokens} rows")
                events.append(SessionsBroken((entry.session_id,), error, agent_id))
                continue
            events.append(
                RowsArrived(
                    entry.session_id, entry.position, part, entry.sample, at, drafts, token_ids
                )
            )
    return events


def token_events(
    header: frame_pb2.FrameHeader, arrived: ArrivalTime, agent_id: str, epoch: int
) -> list[Event]:
    """Returns the events of a `SESSION_TOKENS` frame that is addressed to an agent."""
    events: list[Event] = []
    for session_id, group in itertools.groupby(header.session_tokens, _SESSION_OF):
        token, *more = group
        if token.HasField("cached_tokens"):
            events.append(PrefixConfirmed(session_id, token.cached_tokens))
            continue
        if token.HasField("opening"):
            events.append(_opened(header, token, arrived, agent_id, epoch))
        last = more[-1] if more else token
        if any(each.position != token.position + n for n, each in enumerate(more, 1)):
            error = InvalidInput("position", f"tokens of session {session_id} leave a gap")
            events.append(SessionsBroken((session_id,), error, agent_id))
            continue
        events.append(
            TokenArrived(
                session_id,
                token.position,
                token.token_id,
                bool(last.finish_reason) or last.HasField("failure"),
                arrived,
                tuple([each.token_id for each in more]),
                token.takes_drafts,
            )
        )
    return events


def cache_events(
    header: frame_pb2.FrameHeader,
    frame: ReceivedFrame,
    arrived: ArrivalTime,
    agent_id: str,
    epoch: int,
) -> list[Event]:
    """Returns the events of a `SESSION_CACHE` frame; their handler has the frame released."""
    cache = header.cache
    events: list[Event] = []
    if cache.HasField("opening"):
        events.append(_opened(header, cache, arrived, agent_id, epoch))
    nbytes = len(frame.payload)
    events.append(CacheArrived(cache.session_id, span_of(cache), cache.datatype, frame, nbytes))
    return events


def span_of(cache: frame_pb2.SessionCache) -> CacheSpan:
    """Returns the blocks and tokens of a part of a session's caches."""
    return CacheSpan(cache.first_block, cache.last_block, cache.first_token, cache.last_token)


def move_said(
    move: frame_pb2.SessionMove, arrived: ArrivalTime, agent_id: str, epochs: tuple[int, int]
) -> MoveMessage:
    """Returns the event of a `SESSION_MOVE` frame: one step of a live migration.

    Args:
        move: The step.
        arrived: When it arrived.
        agent_id: The id of this agent.
        epochs: The epoch of the sender, and the highest one this agent knows.
    """
    spec: SessionSpec | CatenaryError | None = None
    if move.step == frame_pb2.SessionMove.STEP_ROUND and move.HasField("opening"):
        try:
            spec = _spec(move, arrived, agent_id, epochs)
        except CatenaryError as error:
            spec = error
    return MoveMessage(move, epochs[0], arrived, spec)


_Entry = (
    frame_pb2.SessionRows | frame_pb2.SessionToken | frame_pb2.SessionCache | frame_pb2.SessionMove
)


def _opened(
    header: frame_pb2.FrameHeader, entry: _Entry, arrived: ArrivalTime, agent_id: str, epoch: int
) -> Event:
    try:
        return SessionOpened(_spec(entry, arrived, agent_id, (header.epoch, epoch)), arrived)
    except CatenaryError as error:
        return SessionsBroken((entry.session_id,), error, agent_id)


def _spec(
    entry: _Entry, arrived: ArrivalTime, agent_id: str, epochs: tuple[int, int]
) -> SessionSpec:
    """Returns what the opening of an entry says of its session.

    Raises:
        InvalidInput: The rings do not contain this agent exactly once, are malformed, or the
            gateway is missing.
        StaleEpoch: The session begins here, and a newer scheduler leads.
        DeadlineExceeded: The deadline has passed.
    """
    opening = entry.opening
    side, hop = _place(opening, agent_id)
    if not opening.gateway_id:
        raise InvalidInput("gateway_id", "missing: nobody to answer to")
    if hop == 0 and side != "decode" and epochs[0] < epochs[1]:
        raise StaleEpoch(f"epoch {epochs[0]} is over; this agent obeys {epochs[1]}")
    deadline_ns = arrived.received_ns - arrived.transfer_ns + opening.budget_ns
    if deadline_ns <= arrived.received_ns:
        raise DeadlineExceeded(
            "the deadline passed on the way to this agent", details={"stage": "transfer"}
        )
    return SessionSpec(entry.session_id, opening, hop, deadline_ns, side)


def _place(opening: frame_pb2.SessionOpening, agent_id: str) -> tuple[Side, int]:
    """Returns the side of the session that an agent serves, and its hop in that ring.

    Raises:
        InvalidInput: The agent is in no ring or in several places, or a ring has no hops, too many,
            or gaps.
    """
    rings = [opening.route, opening.decode_route] if opening.decode_route else [opening.route]
    for ring in rings:
        if not 0 < len(ring) <= MAX_HOPS:
            raise InvalidInput("route", f"{len(ring)} hops; 1 to {MAX_HOPS} are allowed")
    own = [
        (n, i)
        for n, ring in enumerate(rings)
        for i, hop in enumerate(ring)
        if hop.agent_id == agent_id
    ]
    if len(own) != 1:
        raise InvalidInput("route", f"passes {agent_id!r} {len(own)} times instead of once")
    if len(rings) == 1:
        return "mixed", own[0][1]
    if whole(opening.route) is None or whole(opening.route) != whole(opening.decode_route):
        raise InvalidInput("decode_route", "does not cover the blocks of the route")
    return ("decode" if own[0][0] else "prefill"), own[0][1]


def whole(ring: Sequence[common_pb2.Hop]) -> tuple[str, str, int] | None:
    """Returns model, version and last block if the hops cover all blocks from 0 on; else None."""
    block = 0
    for hop in ring:
        if hop.first_block != block or hop.last_block <= block:
            return None
        block = hop.last_block
    return ring[0].model, ring[0].model_version, block
