"""Converts dispatch windows to messages, and gateways' reports of them to events.

Moments become offsets. Ends count from the moment at which the gateway asked: so they are never
later on its clock than in the book, however long an answer takes.
"""

from __future__ import annotations

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.wire.messages import hop_message
from catenary_services.domain.ids import BatchId, Epoch, Nanoseconds


def grant_message(
    command: events.GrantWindow, epoch: Epoch, plan_id: str, now: Nanoseconds
) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the message that grants a window."""
    return scheduler_pb2.SchedulerToGatewayMessage(
        grant_window=scheduler_pb2.GrantWindow(
            epoch=epoch,
            window_id=command.window,
            plan_id=plan_id,
            request_id=command.request.number,
            first_batch_id=command.first_batch,
            batches=command.batches,
            most_wait_ns=command.most_wait_ns,
            hops=[
                scheduler_pb2.WindowHop(
                    hop=hop_message(planned),
                    begins_after_ns=max(0, hop.start_ns - now),
                    ends_after_ns=max(0, hop.end_ns - now),
                    compute_ns=hop.compute_ns,
                    transfer_ns=hop.transfer_ns,
                )
                for planned, hop in zip(command.whole().path, command.hops, strict=True)
            ],
        )
    )


def extend_message(
    command: events.ExtendWindow, now: Nanoseconds
) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the message that extends a window."""
    return scheduler_pb2.SchedulerToGatewayMessage(
        extend_window=scheduler_pb2.ExtendWindow(
            window_id=command.window,
            number=command.number,
            ends_after_ns=[max(0, end - now) for end in command.ends_ns],
        )
    )


def revoke_message(command: events.RevokeWindow) -> scheduler_pb2.SchedulerToGatewayMessage:
    """Returns the message that ends a window."""
    return scheduler_pb2.SchedulerToGatewayMessage(
        revoke_window=scheduler_pb2.RevokeWindow(window_id=command.window, lost=command.lost)
    )


def window_reported(
    grant: events.GrantWindow, message: scheduler_pb2.WindowReport
) -> events.WindowReported:
    """Returns the event of a report about the window of `grant`."""
    return events.WindowReported(
        grant.gateway,
        grant.model,
        grant.window,
        message.number,
        BatchId(message.first_batch_id),
        tuple(message.rows),
        message.requests,
        message.renew,
        tuple(message.busy_ns),
    )
