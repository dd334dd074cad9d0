"""Errors of our own making: logged in full here, known to others only by an incident number."""

from __future__ import annotations

import traceback
import uuid

from catenary_services.errors import InternalError
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.generation")


def incident(what: str, partition: str = "") -> InternalError:
    """Logs the exception being handled, and returns the error that others are told.

    Args:
        what: What failed, in words for others.
        partition: The partition, for the log.
    """
    number = uuid.uuid4().hex[:12]
    # Plain text: a renderer that shows local variables would print tensors and prompts.
    _log.error(
        "generation_failed",
        traceback=traceback.format_exc(),
        incident=number,
        partition=partition,
    )
    return InternalError(f"{what} (incident {number})")
