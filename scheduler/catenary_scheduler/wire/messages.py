"""Converts messages to events and commands to messages, by pure functions.

Moments never cross processes: messages carry offsets from when they were sent, and these functions
turn them into moments of the scheduler's clock by `now` and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    Epoch,
    GatewayId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    ServerId,
)
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.plan import Agent
from catenary_services.errors import error_of_reason

LONGEST_TEXT = 16_384
"""Longest text for people in a message, in characters."""
_MOST_NS = (1 << 62) - 1


def sendable_ns(computed_ns: Nanoseconds) -> Nanoseconds:
    """Returns a computed duration clipped to what may be sent.

    Peers' measurements are part of it.
    """
    return max(0, min(computed_ns, _MOST_NS))


def request_arrived(
    gateway: GatewayId,
    message: scheduler_pb2.SubmitRequest,
    model: ModelKey,
    now: Nanoseconds,
    units: TokenUnits | None = None,
    takes_windows: bool = False,
) -> events.RequestArrived:
    """Returns the event of a submitted request for `model`, which its message names.

    With `units` it has the lengths of its texts; those that a gateway does not tell are full ones.
    `takes_windows` says whether its gateway can dispatch by windows.
    """
    texts: TextLengths | None = None
    if units is not None:
        runs = [(run.rows, run.tokens) for run in message.texts]
        texts = TextLengths.of(runs or [(message.rows, units.text_tokens)], units)
    adopted: tuple[events.AdoptedRows, ...] = ()
    if message.in_flight:
        adopted = tuple(
            events.AdoptedRows(
                BatchId(rows.batch_id), rows.request_row, rows.rows, now + rows.expected_after_ns
            )
            for rows in message.in_flight
        )
    return events.RequestArrived(
        RequestId(gateway, message.request_id),
        model,
        message.rows,
        now + message.budget_ns,
        message.priority,
        adopted,
        texts,
        takes_windows,
    )


def stage_reported(message: scheduler_pb2.StageReport, now: Nanoseconds) -> events.StageReported:
    """Returns the event of a hop that was computed."""
    end = now - message.compute_ended_ago_ns
    if not message.transfer_ns:
        return events.StageReported(
            BatchId(message.batch_id),
            message.position,
            end - message.compute_ns,
            end,
            rows=message.rows,
        )
    arrived = now - message.transfer_ended_ago_ns
    return events.StageReported(
        BatchId(message.batch_id),
        message.position,
        end - message.compute_ns,
        end,
        arrived - message.transfer_ns,
        arrived,
        message.rows,
    )


def stage_started(message: scheduler_pb2.StageStart, now: Nanoseconds) -> events.StageStarted:
    """Returns the event of a transfer or a computation that began."""
    start = now - message.started_ago_ns
    return events.StageStarted(
        BatchId(message.batch_id), message.position, start, message.is_transfer
    )


def request_completed(
    gateway: GatewayId, message: scheduler_pb2.RequestFinished
) -> events.RequestCompleted:
    """Returns the event of a request that its gateway has answered."""
    request = RequestId(gateway, message.request_id)
    has_progress = message.HasField("progress")
    return events.RequestCompleted(
        request,
        session_progress(request, message.progress) if has_progress else None,
        tuple(message.prefix_hashes),
    )


def session_progress(
    request: RequestId, message: scheduler_pb2.SessionProgress
) -> events.SessionProgress | None:
    """Returns how far the answer to a request is; None without a token."""
    if not message.generated_tokens:
        return None
    return events.SessionProgress(
        request,
        message.generated_tokens,
        message.first_token_ns,
        message.decode_ns,
        message.cached_tokens,
    )


def batch_failed(batch_id: int, failure: common_pb2.Failure) -> events.BatchFailed:
    """Returns the event of a batch that an agent or a gateway gave up."""
    return events.BatchFailed(
        BatchId(batch_id),
        AgentId(failure.agent_id) if failure.agent_id else None,
        failure.reason,
        failure.message,
        failure.retryable,
    )


def agent_of(hello: scheduler_pb2.AgentHello) -> Agent:
    """Returns the description of an agent for planner and book."""
    return Agent(
        AgentId(hello.agent_id),
        hello.device_class or hello.device,
        ServerId(hello.server_id or hello.agent_id),
        hello.memory_bytes,
        hello.link_bytes_per_second,
        # An agent of an older release has no virtual GPUs.
        max(1, hello.virtual_level),
        hello.device_id or hello.agent_id,
        hello.commits_caches_on_use,
        hello.decoder_runtime,
        hello.prefill_chunk_tokens,
    )


def partition_of(message: scheduler_pb2.PartitionKey) -> PartitionKey:
    return PartitionKey(
        ModelKey(message.model, message.model_version), message.first_block, message.last_block
    )


def partition_message(key: PartitionKey) -> scheduler_pb2.PartitionKey:
    return scheduler_pb2.PartitionKey(
        model=key.model.name,
        model_version=key.model.version,
        first_block=key.first_block,
        last_block=key.last_block,
    )


def dispatch_messages(
    command: events.DispatchBatch,
    epoch: Epoch,
    plan_id: str,
    traceparents: Mapping[RequestId, str],
    now: Nanoseconds,
) -> dict[GatewayId, scheduler_pb2.SchedulerToGatewayMessage]:
    """Returns the message for each gateway that has rows in the batch."""
    route = [hop_message(hop) for hop in command.path]
    expected = sendable_ns(command.expected_finish_ns - now)
    messages: dict[GatewayId, scheduler_pb2.SchedulerToGatewayMessage] = {}
    for piece in command.slices:
        gateway = piece.request.gateway
        message = messages.get(gateway)
        if message is None:
            message = messages[gateway] = scheduler_pb2.SchedulerToGatewayMessage(
                dispatch=scheduler_pb2.DispatchBatch(
                    epoch=epoch,
                    batch_id=command.batch,
                    plan_id=plan_id,
                    batch_rows=command.rows,
                    route=route,
                    expected_after_ns=expected,
                )
            )
        message.dispatch.slices.add(
            gateway_id=gateway,
            request_id=piece.request.number,
            request_row=piece.request_row,
            rows=piece.rows,
            batch_row=piece.batch_row,
            traceparent=traceparents.get(piece.request, ""),
        )
    return messages


def hop_message(hop: events.PlannedHop) -> common_pb2.Hop:
    """Returns a hop with its reservation."""
    model = hop.partition.model
    return common_pb2.Hop(
        agent_id=hop.agent,
        model=model.name,
        model_version=model.version,
        first_block=hop.partition.first_block,
        last_block=hop.partition.last_block,
        reserved_start_ns=max(0, hop.start_ns),
        reserved_duration_ns=hop.duration_ns,
        earliest_start_ns=max(0, hop.earliest_ns),
        behind_batch_id=hop.behind,
        transfer_start_ns=max(0, hop.transfer_start_ns) if hop.transfer_ns else 0,
        transfer_duration_ns=hop.transfer_ns,
        transfer_earliest_ns=max(0, hop.transfer_earliest_ns),
    )


def reject_message(
    command: events.Reject, now: Nanoseconds
) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the refusal of a request, with moments as offsets from now."""
    earliest = command.earliest_finish_ns
    retry = command.retry_after_ns
    return scheduler_pb2.SchedulerToGatewayMessage(
        reject=scheduler_pb2.RejectRequest(
            request_id=command.request.number,
            failure=common_pb2.Failure(
                reason=command.reason,
                message=command.message[:LONGEST_TEXT],
                agent_id=command.details.get("agent_id", ""),
                retryable=bool(retry),
            ),
            retry_after_ns=sendable_ns(retry or 0),
            earliest_finish_after_ns=0 if earliest is None else sendable_ns(earliest - now),
        )
    )


def cancel_batches_message(
    batches: Iterable[BatchId], epoch: Epoch
) -> scheduler_pb2.SchedulerToAgentMessage:
    """Returns the order to forget batches."""
    return scheduler_pb2.SchedulerToAgentMessage(
        epoch=epoch, cancel_batch=scheduler_pb2.CancelBatch(batch_ids=batches)
    )


def rejection(
    request: RequestId, reason: str, message: str, retry_after_ns: Nanoseconds | None = None
) -> events.Reject:
    """Returns a refusal that the dispatcher did not decide; `reason` is one of the error tree."""
    assert error_of_reason(reason, message).reason == reason
    return events.Reject(request, reason, message, retry_after_ns)
