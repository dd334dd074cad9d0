"""The one frame a gateway sends for a session: its opening, to the first agent of the ring."""

from __future__ import annotations

import time

from catenary_protos.catenary.v1 import frame_pb2
from gateway.delivery import Links, left_s
from gateway.generation.session import PendingSession, Start


async def open_session(session: PendingSession, start: Start, gateway_id: str, hub: Links) -> None:
    """Pushes the opening of a session, with its token history.

    Does nothing once the start has been overtaken by another one or by the request's end.

    Raises:
        DeadlineExceeded: no time is left.
        PartitionLost: the agent cannot be reached.
        Overloaded: the agent took no frame in time.
    """
    order, deadline_ns = start.order, session.deadline_ns
    link = await hub.link_to(order.route[0].agent_id, left_s(deadline_ns))
    slot = await link.export(0, left_s(deadline_ns))
    try:
        if session.current is not start:
            return
        start.push_ns = time.monotonic_ns()
        opening = session.opening(gateway_id, start.push_ns)
        header = frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_SESSION_STEP,
            epoch=order.epoch,
            route=order.route,
            position=0,
            budget_ns=opening.budget_ns,
            plan_id=order.plan_id,
            sent_monotonic_ns=start.push_ns,
            session_rows=[
                frame_pb2.SessionRows(session_id=start.session_id, sample=True, opening=opening)
            ],
        )
        await link.push(slot, header.SerializeToString(), left_s(deadline_ns))
        start.sent_ns = time.monotonic_ns()
    finally:
        slot.release()
