"""Reports of the engine about batches: failures, used resources, and spans."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import CatenaryError, OverloadError, PeerError, StaleEpoch
from catenary_services.telemetry import names
from catenary_services.telemetry.tracing import TraceContext, Tracer, is_sampled, parse_traceparent

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Batch

_PREFIX = "agent."
_WORTH_KNOWING_NS = 10 * NANOSECONDS_PER_MILLISECOND
"""Less time than this is over before the scheduler could give it to another batch."""
_PUNCTUAL_NS = NANOSECONDS_PER_MILLISECOND
"""Least difference to the booked start that the scheduler is told of."""
_SHORT_TRANSFER_NS = NANOSECONDS_PER_MILLISECOND
SPAN_TRANSFER = "transfer"
"""Span from the sender's push to the complete arrival of the frame, as part of a hop."""


class OutgoingMessage(Protocol):
    """A message to the scheduler, whose time offsets count from the moment it is really sent."""

    @property
    def droppable(self) -> bool:
        """True if losing the message makes the scheduler only slightly less precise."""
        ...

    @property
    def is_as_booked(self) -> bool:
        """True if the message changes nothing that the scheduler plans in the next moments."""
        ...

    def message(self) -> scheduler_pb2.AgentMessage:
        """Returns the message as it is to be sent now."""
        ...


@dataclass(frozen=True, slots=True)
class FixedMessage:
    """A message whose content does not depend on the time of sending."""

    content: scheduler_pb2.AgentMessage
    droppable: bool = False
    is_as_booked: bool = False

    def message(self) -> scheduler_pb2.AgentMessage:
        return self.content


class StageDone(NamedTuple):
    """The report that one hop of a batch was computed, in this process's monotonic time."""

    batch_id: int
    position: int
    rows: int
    started_ns: int
    ended_ns: int
    received_ns: int
    transfer_ns: int
    is_as_booked: bool = False
    """Whether the device was used about as long as booked, and the link for a moment only: then
    nothing moves in the scheduler's book, and no time worth giving out is free early."""
    droppable: bool = True

    def message(self) -> scheduler_pb2.AgentMessage:
        """Returns the report with offsets from now."""
        now = time.monotonic_ns()
        return scheduler_pb2.AgentMessage(
            stage_report=scheduler_pb2.StageReport(
                batch_id=self.batch_id,
                position=self.position,
                rows=self.rows,
                compute_ended_ago_ns=now - self.ended_ns,
                compute_ns=self.ended_ns - self.started_ns,
                transfer_ended_ago_ns=now - self.received_ns if self.transfer_ns else 0,
                transfer_ns=self.transfer_ns,
            )
        )


class StageStarted(NamedTuple):
    """The report that a hop or the transfer into it began, in this process's monotonic time."""

    batch_id: int
    position: int
    started_ns: int
    is_transfer: bool
    is_as_booked: bool = False
    droppable: bool = True

    def message(self) -> scheduler_pb2.AgentMessage:
        """Returns the report with the offset from now."""
        return scheduler_pb2.AgentMessage(
            stage_start=scheduler_pb2.StageStart(
                batch_id=self.batch_id,
                position=self.position,
                started_ago_ns=time.monotonic_ns() - self.started_ns,
                is_transfer=self.is_transfer,
            )
        )


def stage_begun(batch: Batch, now_ns: int) -> StageStarted | None:
    """Returns the report that a computation begins now; None if the scheduler need not know.

    It need not if that is as booked, or if the report of the end comes hardly later.
    """
    if not _is_news(batch.booked_ns, batch.hop.reserved_duration_ns, now_ns):
        return None
    return StageStarted(batch.batch_id, batch.position, now_ns, False)


def transfer_begun(batch: Batch, now_ns: int) -> StageStarted | None:
    """Returns the report that outputs begin to leave now; None if the scheduler need not know."""
    following = batch.header.route[batch.position + 1]
    if not _is_news(batch.send_booked_ns, following.transfer_duration_ns, now_ns):
        return None
    return StageStarted(batch.batch_id, batch.position + 1, now_ns, True)


def _is_news(booked_ns: int, duration_ns: int, now_ns: int) -> bool:
    if not booked_ns or duration_ns < _WORTH_KNOWING_NS:
        return False
    return abs(now_ns - booked_ns) >= _PUNCTUAL_NS


def stage_done(batch: Batch) -> StageDone:
    """Returns the report of a computed batch."""
    unused_ns = batch.hop.reserved_duration_ns - (batch.ended_ns - batch.started_ns)
    return StageDone(
        batch.batch_id,
        batch.position,
        batch.rows,
        batch.started_ns,
        batch.ended_ns,
        batch.received_ns,
        batch.transfer_ns,
        0 <= unused_ns < _WORTH_KNOWING_NS and batch.transfer_ns < _SHORT_TRANSFER_NS,
    )


def is_retryable(error: CatenaryError) -> bool:
    """Returns True if the same rows may succeed elsewhere or a little later."""
    return isinstance(error, OverloadError | PeerError | StaleEpoch)


def batch_failed(batch_id: int, position: int, error: CatenaryError, agent_id: str) -> FixedMessage:
    """Returns the message that a batch ended here without a result.

    Args:
        batch_id: The batch.
        position: The hop at which it failed.
        error: The error; its reason and message are sent to the scheduler.
        agent_id: The agent at fault: this one, or the peer that could not be reached.
    """
    failure = common_pb2.Failure(
        reason=error.reason,
        message=error.message,
        agent_id=agent_id,
        retryable=is_retryable(error),
    )
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            batch_failed=scheduler_pb2.BatchFailed(
                batch_id=batch_id, position=position, failure=failure
            )
        )
    )


def record_spans(tracer: Tracer, batch: Batch, agent_id: str, sent_ns: int) -> None:
    """Records the hop as a child span of every sampled request in the batch.

    Called after the outputs have left, so tracing never delays them.
    """
    for piece in batch.slices:
        if not is_sampled(piece.traceparent):
            continue
        request = parse_traceparent(piece.traceparent)
        if request is not None:
            _record_hop(tracer, request, batch, agent_id, sent_ns)


def _record_hop(
    tracer: Tracer, request: TraceContext, batch: Batch, agent_id: str, sent_ns: int
) -> None:
    to_unix = time.time_ns() - time.monotonic_ns()
    arrived = batch.received_ns - batch.transfer_ns
    key = batch.partition.key
    attributes: dict[str, str | int | float | bool] = {
        names.ATTRIBUTE_AGENT_ID: agent_id,
        names.ATTRIBUTE_MODEL: key.model.name,
        names.ATTRIBUTE_MODEL_VERSION: key.model.version,
        names.ATTRIBUTE_BLOCKS: f"[{key.first_block},{key.last_block})",
        names.ATTRIBUTE_BATCH_ID: batch.batch_id,
        names.ATTRIBUTE_BATCH_ROWS: batch.rows,
        names.ATTRIBUTE_POSITION: batch.position,
    }
    hop = request.child()
    parts = (
        (hop, request.span_id, names.SPAN_HOP, arrived, sent_ns),
        (hop.child(), hop.span_id, SPAN_TRANSFER, arrived, batch.received_ns),
        (hop.child(), hop.span_id, names.SPAN_WAIT, batch.received_ns, batch.started_ns),
        (hop.child(), hop.span_id, names.SPAN_COMPUTE, batch.started_ns, batch.ended_ns),
        (hop.child(), hop.span_id, names.SPAN_SEND, batch.ended_ns, sent_ns),
    )
    for context, parent, name, start, end in parts:
        tracer.record(
            context=context,
            parent_span_id=parent,
            name=_PREFIX + name,
            start_unix_ns=start + to_unix,
            end_unix_ns=end + to_unix,
            attributes=attributes if context is hop else {},
        )
