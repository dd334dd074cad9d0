"""The gate of the gRPC doors: key, quota and room are looked at before a message is read."""

from __future__ import annotations

from typing import Any

import grpc.aio

from catenary_gateway.admission.callers import Caller, caller
from catenary_gateway.admission.front_desk import FrontDesk
from catenary_gateway.doors.grpc_calls import metadata_of
from catenary_services.errors import CatenaryError
from catenary_services.grpc.grpc_intake import CONTROL_BYTES, Intake, address_of

_OIP = "/inference.GRPCInferenceService"
_GENERATE = "/catenary.v1.Generation/Generate"
_OPEN = frozenset({f"{_OIP}/ServerLive", f"{_OIP}/ServerReady"})
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_COUNTED = frozenset({f"{_OIP}/ModelInfer", _GENERATE})
_PLAN_BYTES = 16 * CONTROL_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class DoorGate:
    """Lets in callers with a key that may ask for more."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns whose key it is; "" for methods that need none, and where there are no keys.

        Raises:
            Unauthenticated: keys are configured and this is none of them.
            QuotaExceeded: it made as many requests as it may, or too many that were refused.
            Overloaded: too many requests are being worked on.
        """
        desk, address = self._desk, address_of(peer)
        metadata = metadata_of(context)
        arrived = Caller(desk.guard.quotas, address, metadata)
        caller.set(arrived)
        if method in _OPEN or method.startswith(_OPEN_SERVICES):
            return ""
        presented = metadata.get("authorization")
        try:
            principal = desk.enter(presented, address, counts=method in _COUNTED)
        except CatenaryError as error:
            arrived.charge(error)
            raise
        return principal.name if desk.keys.enabled else ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Charges the caller for a message that could not be taken."""
        arrived = caller.get()
        if arrived is not None:
            arrived.charge(error)


def inference_intake(desk: FrontDesk, slack_bytes: int, receiving_bytes: int) -> Intake:
    """Returns what the doors for clients take; tensors have `slack_bytes` of names beside them."""
    largest = desk.admission.max_request_bytes + slack_bytes
    longest = {
        f"{_OIP}/ModelInfer": largest,
        f"{_OIP}/ModelStreamInfer": largest,
        _GENERATE: desk.max_prompt_bytes + slack_bytes,
    }
    return Intake(DoorGate(desk), longest, receiving_bytes=receiving_bytes)


def admin_longest() -> dict[str, int]:
    """Returns the longest message of each method of the door for operators that needs more."""
    return {"/catenary.v1.Admin/ApplyPlan": _PLAN_BYTES}
