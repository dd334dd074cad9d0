"""From session frames to events. Looks at nothing but the frame."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.engine.inbound.intake import MAX_HOPS
from catenary_agent.generation.state.events import (
    Broken,
    CacheArrived,
    Event,
    MoveSaid,
    Opened,
    RowsArrived,
    TokenArrived,
)
from catenary_agent.generation.state.session import Arrived, Facts, Side
from catenary_agent.kv import CacheSpan
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, DeadlineExceeded, InvalidInput, StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catenary_agent.generation.state.session import Hidden
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.transport.interface import ReceivedFrame

_ROW_BYTES = np.dtype(np.float32).itemsize


def arrival(header: frame_pb2.FrameHeader, frame: ReceivedFrame) -> Arrived:
    """Returns when a frame came, and how long it took if both ends have one clock."""
    received_ns = time.monotonic_ns()
    if frame.capabilities.same_host and 0 < header.sent_monotonic_ns <= received_ns:
        return Arrived(received_ns, received_ns - header.sent_monotonic_ns)
    return Arrived(received_ns)


def rows_of_payload(header: frame_pb2.FrameHeader, payload: memoryview) -> Hidden:
    """Returns the hidden states of a frame, copied: float32 `[sum of tokens, hidden]`.

    Raises:
        InvalidInput: the payload is not so many equal rows.
    """
    tokens = sum(each.tokens for each in header.session_rows)
    if tokens == 0:
        if len(payload):
            raise InvalidInput("payload", f"{len(payload)} bytes that belong to no session")
        return np.empty((0, 0), np.float32)
    if len(payload) == 0 or len(payload) % (tokens * _ROW_BYTES):
        raise InvalidInput("payload", f"{len(payload)} bytes are not {tokens} equal rows")
    return np.frombuffer(payload, np.float32).reshape(tokens, -1).copy()


def step_events(
    header: frame_pb2.FrameHeader,
    rows: Hidden,
    arrived: Arrived,
    agent_id: str,
    epoch: int,
) -> list[Event]:
    """Returns what a `SESSION_STEP` frame says, in its order.

    Args:
        header: Of the frame.
        rows: Its hidden states.
        arrived: When it came.
        agent_id: Ours.
        epoch: Sessions of an older one may not begin here as their first hop.
    """
    events: list[Event] = []
    start = 0
    for entry in header.session_rows:
        at = arrived
        if entry.timings:
            at = Arrived(arrived.received_ns, arrived.transfer_ns, tuple(entry.timings))
        if entry.HasField("opening"):
            events.append(_opened(header, entry, at, agent_id, epoch))
        if entry.tokens:
            part = rows[start : start + entry.tokens]
            start += entry.tokens
            events.append(RowsArrived(entry.session_id, entry.position, part, entry.sample, at))
    return events


def token_events(
    header: frame_pb2.FrameHeader, arrived: Arrived, agent_id: str, epoch: int
) -> list[Event]:
    """Returns what a `SESSION_TOKENS` frame says to an agent."""
    events: list[Event] = []
    for token in header.session_tokens:
        if token.HasField("opening"):
            events.append(_opened(header, token, arrived, agent_id, epoch))
        is_last = bool(token.finish_reason) or token.HasField("failure")
        events.append(
            TokenArrived(token.session_id, token.position, token.token_id, is_last, arrived)
        )
    return events


def cache_events(
    header: frame_pb2.FrameHeader,
    frame: ReceivedFrame,
    arrived: Arrived,
    agent_id: str,
    epoch: int,
) -> list[Event]:
    """Returns what a `SESSION_CACHE` frame says; whoever handles it sees to the frame's release."""
    cache = header.cache
    events: list[Event] = []
    if cache.HasField("opening"):
        events.append(_opened(header, cache, arrived, agent_id, epoch))
    span = CacheSpan(cache.first_block, cache.last_block, cache.first_token, cache.last_token)
    nbytes = len(frame.payload)
    events.append(CacheArrived(cache.session_id, span, cache.datatype, frame, nbytes))
    return events


def move_said(
    move: frame_pb2.SessionMove, arrived: Arrived, agent_id: str, epochs: tuple[int, int]
) -> MoveSaid:
    """Returns what a step of a live migration says.

    Args:
        move: The step.
        arrived: When it came.
        agent_id: Ours.
        epochs: That of who says it, and ours.
    """
    facts: Facts | CatenaryError | None = None
    if move.step == frame_pb2.SessionMove.STEP_ROUND and move.HasField("opening"):
        try:
            facts = _facts(move, arrived, agent_id, epochs)
        except CatenaryError as error:
            facts = error
    return MoveSaid(move, epochs[0], arrived, facts)


_Entry = (
    frame_pb2.SessionRows | frame_pb2.SessionToken | frame_pb2.SessionCache | frame_pb2.SessionMove
)


def _opened(
    header: frame_pb2.FrameHeader, entry: _Entry, arrived: Arrived, agent_id: str, epoch: int
) -> Event:
    try:
        return Opened(_facts(entry, arrived, agent_id, (header.epoch, epoch)), arrived)
    except CatenaryError as error:
        return Broken((entry.session_id,), error, agent_id)


def _facts(entry: _Entry, arrived: Arrived, agent_id: str, epochs: tuple[int, int]) -> Facts:
    """Returns what the opening says.

    Raises:
        InvalidInput: the ring does not pass here exactly once, or an end of it is missing.
        StaleEpoch: the session begins here and a newer scheduler leads.
        DeadlineExceeded: no time is left.
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
    return Facts(entry.session_id, opening, hop, deadline_ns, side)


def _place(opening: frame_pb2.SessionOpening, agent_id: str) -> tuple[Side, int]:
    """Returns on which ring an agent is, and which hop of it.

    Raises:
        InvalidInput: on none, or more than once; or a ring has no hops, or too many, or gaps.
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
    """Returns model and last block of hops that follow each other from block 0; else None."""
    block = 0
    for hop in ring:
        if hop.first_block != block or hop.last_block <= block:
            return None
        block = hop.last_block
    return ring[0].model, ring[0].model_version, block
