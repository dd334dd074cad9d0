"""From session frames to events. Looks at nothing but the frame."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from catenary_protos.catenary.v1 import frame_pb2
from gpu_agent.engine.intake import MAX_HOPS
from gpu_agent.generation.events import Broken, Event, Opened, RowsArrived, TokenArrived
from gpu_agent.generation.session import Arrived, Facts
from services.errors import CatenaryError, DeadlineExceeded, InvalidInput, StaleEpoch

if TYPE_CHECKING:
    from gpu_agent.generation.session import Hidden
    from services.transport.interface import ReceivedFrame

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
            try:
                facts = _facts(header, entry, at, agent_id, epoch)
            except CatenaryError as error:
                events.append(Broken((entry.session_id,), error, agent_id))
            else:
                events.append(Opened(facts, at))
        if entry.tokens:
            part = rows[start : start + entry.tokens]
            start += entry.tokens
            events.append(RowsArrived(entry.session_id, entry.position, part, entry.sample, at))
    return events


def token_events(header: frame_pb2.FrameHeader, arrived: Arrived) -> list[Event]:
    """Returns what a `SESSION_TOKENS` frame says to the first agent."""
    return [
        TokenArrived(
            token.session_id,
            token.position,
            token.token_id,
            bool(token.finish_reason) or token.HasField("failure"),
            arrived,
        )
        for token in header.session_tokens
    ]


def _facts(
    header: frame_pb2.FrameHeader,
    entry: frame_pb2.SessionRows,
    arrived: Arrived,
    agent_id: str,
    epoch: int,
) -> Facts:
    """Returns what the opening says.

    Raises:
        InvalidInput: the ring does not pass here exactly once, or an end of it is missing.
        StaleEpoch: the session begins here and a newer scheduler leads.
        DeadlineExceeded: no time is left.
    """
    opening = entry.opening
    if not 0 < len(opening.route) <= MAX_HOPS:
        raise InvalidInput("route", f"{len(opening.route)} hops; 1 to {MAX_HOPS} are allowed")
    own = [i for i, hop in enumerate(opening.route) if hop.agent_id == agent_id]
    if len(own) != 1:
        raise InvalidInput("route", f"passes {agent_id!r} {len(own)} times instead of once")
    if not opening.gateway_id:
        raise InvalidInput("gateway_id", "missing: nobody to answer to")
    if own[0] == 0 and header.epoch < epoch:
        raise StaleEpoch(f"epoch {header.epoch} is over; this agent obeys {epoch}")
    deadline_ns = arrived.received_ns - arrived.transfer_ns + opening.budget_ns
    if deadline_ns <= arrived.received_ns:
        raise DeadlineExceeded(
            "the deadline passed on the way to this agent", details={"stage": "transfer"}
        )
    return Facts(entry.session_id, opening, own[0], deadline_ns)
