"""The one table that maps errors to gRPC status with `google.rpc` details, and to HTTP.

A caller may retry exactly what carries retry advice: `RetryInfo` and the trailer
`grpc-retry-pushback-ms` on gRPC, `Retry-After` on HTTP. An overload without advice, such as a
request that is too large at any time, says -1 there, so that clients with built-in retries do not
repeat it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from catenary_protos.catenary.v1 import common_pb2
from catenary_services import errors
from catenary_services.errors import CatenaryError
from catenary_services.grpc import error_details as details
from catenary_services.grpc.error_details import STATUS_DETAILS_KEY, is_anonymous, public_message
from catenary_services.grpc.rpc_errors import error_of_rpc
from catenary_services.log import get_logger

PUSHBACK_KEY = "grpc-retry-pushback-ms"

_NANOSECONDS_PER_SECOND = 1_000_000_000

_log = get_logger("catenary_services.errors")

Trailers = tuple[tuple[str, str | bytes], ...]
_Detail = Callable[[CatenaryError, int | None], Message | None]


@dataclass(frozen=True, slots=True)
class _Row:
    """The outside form of one kind of error."""

    grpc: grpc.StatusCode
    http: int
    openai_type: str
    detail_makers: tuple[_Detail, ...] = ()
    retry_after_ns: int | None = None
    """Retry advice for errors that bring none of their own; None for no advice."""
    retryable: bool = False
    """Whether another attempt inside the cluster, elsewhere or later, may succeed."""
    pushback: bool = False
    """Whether clients retry its gRPC code by themselves, so that they must be told when to, or
    never to."""


def grpc_code(error: CatenaryError) -> grpc.StatusCode:
    """Returns the status code for `error`."""
    return _row(error).grpc


def rpc_status(error: CatenaryError) -> status_pb2.Status:
    """Returns code, message and details of an error, small enough for trailers."""
    row = _row(error)
    code: int = row.grpc.value[0]
    wait_ns = retry_after_ns(error)
    status = status_pb2.Status(code=code, message=public_message(error))
    for make in row.detail_makers:
        detail = make(error, wait_ns)
        if detail is not None:
            status.details.add().Pack(detail)
    return status


def trailing_metadata(error: CatenaryError) -> Trailers:
    """Returns the trailers of an error: its details and the retry push-back."""
    trailers: list[tuple[str, str | bytes]] = [
        (STATUS_DETAILS_KEY, rpc_status(error).SerializeToString())
    ]
    if _row(error).pushback:
        wait_ns = retry_after_ns(error)
        milliseconds = -1 if wait_ns is None else math.ceil(wait_ns / 1_000_000)
        trailers.append((PUSHBACK_KEY, str(milliseconds)))
    return tuple(trailers)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: CatenaryError) -> NoReturn:
    """Ends the gRPC call with an error; never returns."""
    errors.forget_frames(error)
    await context.abort(grpc_code(error), public_message(error), trailing_metadata(error))
    raise AssertionError("abort raises")  # tells the type checker that abort never returns


def http_status(error: CatenaryError) -> int:
    """Returns the HTTP status code of an error."""
    return _row(error).http


def http_headers(error: CatenaryError) -> dict[str, str]:
    """Returns the HTTP headers of an error, with `Retry-After` in whole seconds, rounded up."""
    wait_ns = retry_after_ns(error)
    headers: dict[str, str] = {}
    if wait_ns is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait_ns / _NANOSECONDS_PER_SECOND)))
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def http_body(error: CatenaryError) -> dict[str, object]:
    """Returns the error body of the Open Inference Protocol."""
    return {"error": public_message(error)}


def openai_body(error: CatenaryError) -> dict[str, object]:
    """Returns the error body that clients of OpenAI parse."""
    return {
        "error": {
            "message": public_message(error),
            "type": _row(error).openai_type,
            "param": error.details.get("field", _param(error)),
            "code": error.details.get("code", error.reason.lower()),
        }
    }


def anthropic_body(error: CatenaryError) -> dict[str, object]:
    """Returns the error body that clients of Anthropic parse."""
    detail = {"type": anthropic_type(http_status(error)), "message": public_message(error)}
    return {"type": "error", "error": detail}


def anthropic_type(status: int) -> str:
    """Returns the type of error that Anthropic's protocol has for an HTTP status."""
    if status in _ANTHROPIC_TYPES:
        return _ANTHROPIC_TYPES[status]
    return "invalid_request_error" if status < _SERVER_STATUS else "api_error"


def _param(error: CatenaryError) -> str | None:
    return "model" if isinstance(error, errors.ModelNotFound) else None


def retry_after_ns(error: CatenaryError) -> int | None:
    """Returns the nanoseconds to wait before a retry, None without advice.

    The advice of the error itself goes before that of its kind.
    """
    return _row(error).retry_after_ns if error.retry_after_ns is None else error.retry_after_ns


def failure_of(
    error: CatenaryError, agent_id: str = "", *, retryable: bool | None = None
) -> common_pb2.Failure:
    """Returns the message that carries an error between processes of the cluster.

    Args:
        error: The error.
        agent_id: The agent it happened at; empty if at none.
        retryable: Overrides what the table says of this kind of error.
    """
    return common_pb2.Failure(
        reason=error.reason,
        message=public_message(error),
        agent_id=agent_id,
        retryable=_row(error).retryable if retryable is None else retryable,
    )


def error_of(failure: common_pb2.Failure, *, retry_after_ns: int | None = None) -> CatenaryError:
    """Returns the error another process described; the inverse of `failure_of`."""
    facts = {"agent_id": failure.agent_id} if failure.agent_id else {}
    if failure.reason in (errors.InvalidInput.reason, errors.InvalidMessage.reason):
        # The message of either begins with the field.
        facts["field"] = failure.message.partition(": ")[0]
    error = errors.error_of_reason(
        failure.reason, failure.message, retry_after_ns=retry_after_ns, details=facts
    )
    error.details.update(facts)
    return error


def error_of_exception(exc: Exception) -> CatenaryError:
    """Returns an exception as an error of the tree.

    An unforeseen one is logged and becomes an id.
    """
    if isinstance(exc, TimeoutError):
        return errors.DeadlineExceeded("a step took longer than it was allowed to")
    error = error_of_rpc(exc) if isinstance(exc, grpc.aio.AioRpcError) else exc
    if not isinstance(error, CatenaryError):
        return _logged(exc)
    if isinstance(error, errors.InternalError) and not is_anonymous(error.message):
        return _logged(exc)
    return error


def _logged(exc: Exception) -> errors.InternalError:
    error_id = uuid.uuid4().hex[:12]
    _log.error("internal_error", error_id=error_id, exc_info=exc)
    return errors.InternalError(f"internal error, id {error_id}", details={"error_id": error_id})


def _row(error: CatenaryError) -> _Row:
    for kind in type(error).__mro__:
        row = TABLE.get(kind)
        if row is not None:
            return row
    return TABLE[errors.InternalError]


_C = grpc.StatusCode
_BAD, _LIMIT, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
_SOON_NS, _LATER_NS = 100_000_000, _NANOSECONDS_PER_SECOND
_SERVER_STATUS = 500
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's name for an error, by its HTTP status."""

_RETRY = (details.retry, details.error_info)
_PRECONDITION = (details.precondition, details.error_info)

# 503 means that the cluster is full, 429 that this caller is over its share.
TABLE: dict[type[CatenaryError], _Row] = {
    errors.InvalidInput: _Row(
        _C.INVALID_ARGUMENT, 400, _BAD, (details.bad_request, details.error_info)
    ),
    # A retry never helps: there is no RetryInfo, and the push-back forbids retries by code.
    errors.PayloadTooLarge: _Row(
        _C.RESOURCE_EXHAUSTED, 413, _BAD, (details.error_info,), pushback=True
    ),
    errors.ModelNotFound: _Row(_C.NOT_FOUND, 404, _BAD, (details.resource, details.error_info)),
    errors.NotSupported: _Row(_C.UNIMPLEMENTED, 501, _BAD, (details.error_info,)),
    errors.Unauthenticated: _Row(_C.UNAUTHENTICATED, 401, "authentication_error"),
    errors.PermissionDenied: _Row(_C.PERMISSION_DENIED, 403, "permission_error"),
    errors.RequestCancelled: _Row(_C.CANCELLED, 499, _BAD),
    errors.Overloaded: _Row(
        _C.RESOURCE_EXHAUSTED, 503, _SERVER, _RETRY, _SOON_NS, retryable=True, pushback=True
    ),
    errors.CacheFull: _Row(
        _C.RESOURCE_EXHAUSTED, 503, _SERVER, _RETRY, _SOON_NS, retryable=True, pushback=True
    ),
    # Advice is computed by the dispatcher, if at all: a deadline below compute time never fits.
    errors.SloUnattainable: _Row(_C.RESOURCE_EXHAUSTED, 503, _SERVER, _RETRY, pushback=True),
    errors.QuotaExceeded: _Row(
        _C.RESOURCE_EXHAUSTED, 429, _LIMIT, (details.quota, *_RETRY), _LATER_NS, pushback=True
    ),
    errors.DeadlineExceeded: _Row(_C.DEADLINE_EXCEEDED, 504, _SERVER, (details.error_info,)),
    errors.NoActivePlan: _Row(_C.FAILED_PRECONDITION, 503, _SERVER, _PRECONDITION, retryable=True),
    errors.PlanInfeasible: _Row(_C.FAILED_PRECONDITION, 409, _BAD, _PRECONDITION),
    errors.ContentMismatch: _Row(_C.FAILED_PRECONDITION, 409, _BAD, _PRECONDITION),
    errors.CanaryFailed: _Row(_C.FAILED_PRECONDITION, 409, _SERVER, _PRECONDITION),
    errors.StaleEpoch: _Row(_C.ABORTED, 409, _SERVER, (details.error_info,), retryable=True),
    errors.Unavailable: _Row(
        _C.UNAVAILABLE, 503, _SERVER, _RETRY, _LATER_NS, retryable=True, pushback=True
    ),
    errors.PartitionLost: _Row(
        _C.UNAVAILABLE, 503, _SERVER, _RETRY, _SOON_NS, retryable=True, pushback=True
    ),
    errors.InvalidMessage: _Row(
        _C.INVALID_ARGUMENT, 400, _SERVER, (details.bad_request, *_RETRY), pushback=True
    ),
    errors.DeviceFailed: _Row(
        _C.UNAVAILABLE, 503, _SERVER, _RETRY, _SOON_NS, retryable=True, pushback=True
    ),
    errors.DeviceLost: _Row(
        _C.UNAVAILABLE, 503, _SERVER, _RETRY, _LATER_NS, retryable=True, pushback=True
    ),
    errors.DeviceOutOfMemory: _Row(
        _C.UNAVAILABLE, 503, _SERVER, _RETRY, _LATER_NS, retryable=True, pushback=True
    ),
    # There is no advice: it was already tried on other agents, with the same result.
    errors.ComputeFailed: _Row(_C.INTERNAL, 500, _SERVER, (details.error_info,)),
    # Clients get only an id, not even the facts that a careless `raise` attached.
    errors.InternalError: _Row(_C.INTERNAL, 500, _SERVER, (details.request_info,)),
}
