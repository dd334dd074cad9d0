"""Frames that carry the steps of live migrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from catenary_agent.engine.reporting import is_retryable
from catenary_agent.generation.frames.peers import SessionFrame
from catenary_protos.catenary.v1 import common_pb2, frame_pb2

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import MoveOut
    from catenary_services.errors import CatenaryError


@dataclass(slots=True)
class MoveFrame(SessionFrame):
    """One step of a live migration, addressed to one agent; nothing fails with a move given up."""

    KIND = frame_pb2.FRAME_KIND_SESSION_MOVE
    out: MoveOut

    @property
    def session_ids(self) -> tuple[int, ...]:
        move = self.out.move
        is_over = move.step == frame_pb2.SessionMove.STEP_GIVE_UP
        return () if is_over else (move.session_id,)

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        header.move.CopyFrom(self.out.move)
        if header.move.HasField("opening"):
            header.move.opening.budget_ns = self.out.deadline_ns - header.sent_monotonic_ns


def give_up_of(
    move: frame_pb2.SessionMove, agent_id: str, error: CatenaryError, blamed: str
) -> frame_pb2.SessionMove:
    """Returns the step that tells others that a move failed.

    Args:
        move: Any step of the move.
        agent_id: The agent that sends the step.
        error: The reason of the failure.
        blamed: The agent or gateway at fault.
    """
    return frame_pb2.SessionMove(
        session_id=move.session_id,
        moved_session_id=move.moved_session_id,
        step=frame_pb2.SessionMove.STEP_GIVE_UP,
        by_tokens=move.by_tokens,
        agent_id=agent_id,
        failure=common_pb2.Failure(
            reason=error.reason,
            message=error.message,
            agent_id=blamed,
            retryable=is_retryable(error),
        ),
    )
