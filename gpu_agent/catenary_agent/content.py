"""Comparison of this agent's copy of a model with the one that the scheduler ordered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_services.content.record import SHOWN_DIGITS, machine
from catenary_services.errors import ContentMismatch

if TYPE_CHECKING:
    from catenary_protos.catenary.v1 import scheduler_pb2

CONTENT = "content"
"""A key in an error's details: the digest of the version's content on this machine."""


def is_content_as_ordered(content: str, order: scheduler_pb2.LoadPartition) -> bool:
    """Returns True unless both digests are known and differ."""
    return not content or not order.content_digest or content == order.content_digest


def check_content(what: str, content: str, order: scheduler_pb2.LoadPartition) -> None:
    """Checks that a digest is the one that was ordered.

    Args:
        what: The object that has the digest, for the message.
        content: The digest on this machine; empty if it is unknown.
        order: The order of the scheduler.

    Raises:
        ContentMismatch: The digests differ.
    """
    if not is_content_as_ordered(content, order):
        raise ContentMismatch(
            f"{what} on {machine()} is not what the cluster serves: sha256"
            f" {content[:SHOWN_DIGITS]} instead of {order.content_digest[:SHOWN_DIGITS]}",
            details={
                "expected": order.content_digest,
                CONTENT: content,
                "machine": machine(),
            },
        )
