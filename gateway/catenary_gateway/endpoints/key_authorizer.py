"""The first check of gRPC calls: key, quota and room, before a message is read."""

from __future__ import annotations

from typing import Any

import grpc.aio

from catenary_gateway.admission.callers import Caller, caller
from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.endpoints.grpc_calls import metadata_of
from catenary_services.errors import CatenaryError
from catenary_services.grpc.grpc_intake import CONTROL_BYTES, CallPolicy, address_of

_OIP = "/inference.GRPCInferenceService"
_GENERATE = "/catenary.v1.Generation/Generate"
_OPEN = frozenset({f"{_OIP}/ServerLive", f"{_OIP}/ServerReady"})
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_COUNTED = frozenset({f"{_OIP}/ModelInfer", _GENERATE})
_PLAN_BYTES = 16 * CONTROL_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class KeyAuthorizer:
    """An authorizer that admits callers by their API key."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns the name of the caller's key; "" if no key is needed or none are configured.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
            QuotaExceeded: The key made as many requests as it may, or too many that were refused.
            Overloaded: Too many requests are being worked on.
        """
        pipeline, address = self._pipeline, address_of(peer)
        metadata = metadata_of(context)
        arrived = Caller(pipeline.authorizer.quotas, address, metadata)
        caller.set(arrived)
        if method in _OPEN or method.startswith(_OPEN_SERVICES):
            return ""
        presented = metadata.get("authorization")
        try:
            principal = pipeline.enter(presented, address, counts=method in _COUNTED)
        except CatenaryError as error:
            arrived.charge(error)
            raise
        return principal.name if pipeline.keys.enabled else ""

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Charges the caller for a message that was refused."""
        arrived = caller.get()
        if arrived is not None:
            arrived.charge(error)


def inference_call_policy(
    pipeline: RequestPipeline, slack_bytes: int, receiving_bytes: int
) -> CallPolicy:
    """Returns the policy of inference endpoints: key checks, and limits on message sizes.

    A message may have `slack_bytes` more than its tensors or prompt.
    """
    largest = pipeline.admission.max_request_bytes + slack_bytes
    longest = {
        f"{_OIP}/ModelInfer": largest,
        f"{_OIP}/ModelStreamInfer": largest,
        _GENERATE: pipeline.max_prompt_bytes + slack_bytes,
    }
    return CallPolicy(KeyAuthorizer(pipeline), longest, receiving_bytes=receiving_bytes)


def admin_longest() -> dict[str, int]:
    """Returns the size limits in bytes of Admin methods that need more than the usual one."""
    return {"/catenary.v1.Admin/ApplyPlan": _PLAN_BYTES}
