"""Frames that a gateway sends for a session: its opening, or the order to move it."""

from __future__ import annotations

import time

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.generation.sessions.start import SessionStart
from catenary_gateway.results.delivery import LinkSource, left_s
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.transport.acknowledgements import Lost


async def open_session(
    session: PendingSession,
    start: SessionStart,
    gateway_id: str,
    hub: LinkSource,
    lost: Lost | None = None,
) -> None:
    """Sends the opening of a start, with the token history, to the agent that must know it.

    That is the first agent of the start's ring. For a start that takes over from another it is the
    first agent of the ring that generates now, which organises the move. Nothing is sent if the
    start has been replaced by another one, or the request has ended. `lost` is called if the link
    breaks before it is certain that the opening has arrived.

    Raises:
        DeadlineExceeded: No time is left.
        PartitionLost: The agent cannot be reached.
        Overloaded: The agent took no frame in time.
    """
    deadline_ns = session.due_ns
    ring = start.order.route if start.moves is None else start.moves.ring
    link = await hub.link_to(ring[0].agent_id, left_s(deadline_ns))
    slot = await link.export(0, left_s(deadline_ns))
    try:
        if not session.believes(start):
            return
        start.push_ns = time.monotonic_ns()
        opening = session.opening(start, gateway_id, start.push_ns)
        header = _opened(start, opening) if start.moves is None else _moved(start, opening)
        await link.push(slot, header.SerializeToString(), left_s(deadline_ns), lost)
        start.sent_ns = time.monotonic_ns()
    finally:
        slot.release()


def _opened(start: SessionStart, opening: frame_pb2.SessionOpening) -> frame_pb2.FrameHeader:
    rows = frame_pb2.SessionRows(session_id=start.session_id, sample=True, opening=opening)
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_STEP,
        epoch=start.order.epoch,
        route=start.order.route,
        position=0,
        budget_ns=opening.budget_ns,
        plan_id=start.order.plan_id,
        sent_monotonic_ns=start.push_ns,
        session_rows=[rows],
    )


def _moved(start: SessionStart, opening: frame_pb2.SessionOpening) -> frame_pb2.FrameHeader:
    order = start.order
    move = frame_pb2.SessionMove(
        session_id=start.session_id,
        moved_session_id=order.moved_session_id,
        step=frame_pb2.SessionMove.STEP_BEGIN,
        by_tokens=order.move_mode == scheduler_pb2.MOVE_MODE_TOKENS,
        opening=opening,
    )
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_MOVE,
        epoch=order.epoch,
        budget_ns=opening.budget_ns,
        plan_id=order.plan_id,
        sent_monotonic_ns=start.push_ns,
        move=move,
    )
