"""The part that all gRPC methods of a gateway share: the check of keys, and error answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from catenary_gateway.admission.request_pipeline import RequestPipeline, charge
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import abort, error_of_exception
from catenary_services.grpc.server.call_policy import CallPolicy, address_of
from catenary_services.grpc.server.methods import CONTROL_BYTES, BufferParser

_OIP = "/inference.GRPCInferenceService"
_GENERATE = "/catenary.v1.Generation/Generate"
_OPEN = frozenset({f"{_OIP}/ServerLive", f"{_OIP}/ServerReady"})
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_COUNTED = frozenset({f"{_OIP}/ModelInfer", _GENERATE})
_PLAN_BYTES = 16 * CONTROL_BYTES

S = TypeVar("S")
P = ParamSpec("P")
Request = TypeVar("Request")
Response = TypeVar("Response")
_Context = grpc.aio.ServicerContext[Any, Any]
_Method = Callable[[S, Request, _Context], Awaitable[Response]]


def answered(
    method: Callable[Concatenate[S, Request, P], Awaitable[Response]],
) -> Callable[Concatenate[S, Request, P], Awaitable[Response]]:
    """Wraps `method`: any error it raises ends the call with a status and details."""

    @functools.wraps(method)
    async def call(self: S, request: Request, /, *args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await method(self, request, *args, **kwargs)
        except Exception as exc:
            context, error = args[0], error_of_exception(exc)
            charge(error)
            await abort(context, error)  # type: ignore[arg-type]

    return call


def metadata_of(context: _Context) -> dict[str, str]:
    """Returns the text metadata of a call."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


class KeyAuthorizer:
    """An authorizer that admits callers by their API key."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def enter(self, method: str, context: _Context, peer: str) -> str:
        """Returns the name of the caller's key; "" if no key is needed or none are configured.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
            QuotaExceeded: The key made as many requests as it may, or too many that were refused.
            Overloaded: Too many requests are being worked on.
        """
        pipeline = self._pipeline
        metadata = metadata_of(context)
        arrived = pipeline.arrived(address_of(peer), metadata)
        if method in _OPEN or method.startswith(_OPEN_SERVICES):
            return ""
        presented = metadata.get("authorization")
        try:
            principal = pipeline.enter(presented, counts=method in _COUNTED)
        except CatenaryError as error:
            arrived.charge(error)
            raise
        return principal.name if pipeline.keys.enabled else ""

    def refused(self, method: str, context: _Context, error: CatenaryError) -> None:
        """Charges the caller for a message that was refused."""
        charge(error)


def inference_call_policy(
    pipeline: RequestPipeline,
    slack_bytes: int,
    receiving_bytes: int,
    buffer_parsers: Mapping[str, BufferParser],
) -> CallPolicy:
    """Returns the policy of inference endpoints: key checks, and limits on message sizes.

    A message may have `slack_bytes` more than its tensors or prompt. Those with tensors are read by
    `buffer_parsers`.
    """
    largest = pipeline.capacity.max_request_bytes + slack_bytes
    longest = {
        **dict.fromkeys(buffer_parsers, largest),
        _GENERATE: pipeline.max_prompt_bytes + slack_bytes,
    }
    return CallPolicy(
        KeyAuthorizer(pipeline),
        longest,
        buffer_parsers=buffer_parsers,
        receiving_bytes=receiving_bytes,
    )


def admin_longest() -> dict[str, int]:
    """Returns the size limits in bytes of Admin methods that need more than the usual one."""
    return {"/catenary.v1.Admin/ApplyPlan": _PLAN_BYTES}
