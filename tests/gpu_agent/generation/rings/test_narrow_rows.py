"""Hidden states on their way to another machine, as they are or rounded to half the bytes."""

from __future__ import annotations

import numpy as np
import pytest

from catenary_agent.generation.frames import intake
from catenary_agent.generation.frames.peers import Priority
from catenary_agent.generation.frames.wire import StepFrame, frames_of
from catenary_agent.generation.state.events import RowsOut
from catenary_agent.generation.state.partition_batcher import PromptTurn
from catenary_agent.generation.state.session import NO_DRAFTS, ArrivalTime, SessionSpec
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import InvalidInput
from tests.support.ring_harness import BLOCKS, opening

RING = [("a", 0, 2), ("b", 2, BLOCKS)]


def rows_out(session: int, rows: np.ndarray, turn: PromptTurn | None = None) -> RowsOut:
    spec = SessionSpec(session, opening(RING, [1, 2, 3]), 0, 1 << 62)
    return RowsOut(spec, 0, rows, turn is None, False, ArrivalTime(7), 7, 7, NO_DRAFTS, turn=turn)


def carried(frame: StepFrame) -> tuple[frame_pb2.FrameHeader, memoryview]:
    payload = bytearray(frame.nbytes)
    frame.fill(memoryview(payload))
    return frame_pb2.FrameHeader.FromString(frame.header(1, "a", 1)), memoryview(payload)


def test_rows_arrive_as_they_were_sent() -> None:
    one, other = np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)
    header, payload = carried(StepFrame([rows_out(1, one), rows_out(2, other)]))
    assert np.array_equal(intake.rows_of_payload(header, payload), np.concatenate((one, other)))


def test_narrow_rows_take_half_the_bytes_and_are_rounded_to_the_nearest() -> None:
    rows = np.random.default_rng(2).standard_normal((5, 8)).astype(np.float32) * 1e6
    frame = StepFrame([rows_out(1, rows)])
    whole = frame.nbytes
    frame.narrow()
    assert frame.nbytes == whole // 2
    header, payload = carried(frame)
    got = intake.rows_of_payload(header, payload)
    assert np.all(np.abs(got - rows) <= np.abs(rows) * 2.0**-8)
    again = StepFrame([rows_out(1, got)])
    again.narrow()
    assert np.array_equal(intake.rows_of_payload(*carried(again)), got)


def test_rows_of_unknown_numbers_are_refused() -> None:
    header, payload = carried(StepFrame([rows_out(1, np.ones((2, 8), np.float32))]))
    header.rows_datatype = "INT4"
    with pytest.raises(InvalidInput, match="INT4"):
        intake.rows_of_payload(header, payload)


def test_rows_that_may_be_overtaken_have_frames_of_their_own_behind_the_others() -> None:
    row, turns = np.ones((1, 8), np.float32), [PromptTurn(9, 5, 1, 3), PromptTurn(8, 6, 1, 4)]
    rows = [rows_out(3, row, turns[0]), rows_out(1, row), rows_out(4, row, turns[1])]
    rows.append(rows_out(2, row))
    left: list[int] = []
    frames = [frame for _, frame in frames_of(rows, (), left=left.append)]
    assert [frame.session_ids for frame in frames] == [(1, 2), (3,), (4,)]
    priorities = [frame.priority for frame in frames]
    assert priorities == [Priority.RINGS, Priority.PROMPTS, Priority.PROMPTS]
    assert [frame.turn for frame in frames[1:]] == [(9, 5), (8, 6)]
    for frame in frames:
        frame.settle()
    assert left == [3, 4]
