"""Conversion of a failed RPC into the error of `catenary.errors` that it stands for. Pure.

Servers of Catenary attach a `google.rpc.Status` in the trailer `grpc-status-details-bin`; other
servers of the protocol send only a code and a text. Both become errors of the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from catenary import errors

DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

# The meaning of a bare code when nothing more specific came with it.
_CLASS_OF_CODE: dict[str, type[errors.CatenaryError]] = {
    "ABORTED": errors.StaleEpochError,
    "CANCELLED": errors.RequestCancelledError,
    "DEADLINE_EXCEEDED": errors.DeadlineExceededError,
    "FAILED_PRECONDITION": errors.NoActivePlanError,
    "INVALID_ARGUMENT": errors.InvalidInputError,
    "NOT_FOUND": errors.ModelNotFoundError,
    "OUT_OF_RANGE": errors.InvalidInputError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": errors.OverloadedError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "UNAVAILABLE": errors.UnavailableError,
    "UNIMPLEMENTED": errors.NotSupportedError,
}


_CONNECTION_LOST = frozenset({"Stream removed", "Connection reset by peer", "Socket closed"})
"""Texts of gRPC itself, under UNKNOWN, for a process at the other end that went away."""


class FailedCall(Protocol):
    """The methods that grpc.RpcError and grpc.aio.AioRpcError share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def error_of_call(call: FailedCall) -> errors.CatenaryError:
    """Returns the typed error of a failed RPC, sync or asyncio."""
    trailers = {str(key): value for key, value in call.trailing_metadata() or ()}
    code = call.code().name
    error = error_of_status(code, call.details() or "", rich_status(trailers))
    _obey_pushback(error, trailers)
    return error


def rich_status(trailers: Mapping[str, Any]) -> status_pb2.Status | None:
    """Returns the status in the trailers, None if there is none or it cannot be read."""
    raw = trailers.get(DETAILS_TRAILER)
    if not isinstance(raw, bytes):
        return None
    try:
        return status_pb2.Status.FromString(raw)
    except DecodeError:
        return None


def error_of_status(
    code: str, text: str, status: status_pb2.Status | None = None
) -> errors.CatenaryError:
    """Returns the typed error of a gRPC code, its text, and the details if there are any."""
    found = _Details()
    for packed in status.details if status is not None else ():
        found.take(packed)
    cls = errors.CLASS_OF_REASON.get(found.reason) or _class_of_code(code, text, found)
    message = (status.message if status is not None else "") or text
    return cls(
        message or f"the server answered {code}",
        retry_after_s=found.retry_after_s,
        details=found.facts,
        code=code,
    )


def error_of_reason(reason: str, message: str) -> errors.CatenaryError:
    """Returns the typed error of a reason's name; `InternalError` for an unknown one."""
    return errors.CLASS_OF_REASON.get(reason, errors.InternalError)(message)


class _Details:
    """Collects the google.rpc details of one status; unknown kinds are skipped."""

    def __init__(self) -> None:
        self.reason = ""
        self.retry_after_s: float | None = None
        self.facts: dict[str, str] = {}
        self.quota = False

    def take(self, packed: Any) -> None:
        """Reads one google.protobuf.Any."""
        name = packed.TypeName().rpartition(".")[2]
        reader = getattr(self, f"_take_{name}", None)
        if reader is None or not packed.TypeName().startswith("google.rpc."):
            return
        detail = getattr(error_details_pb2, name)()
        try:
            unpacked = packed.Unpack(detail)
        except DecodeError:
            return
        if unpacked:
            reader(detail)

    def _take_ErrorInfo(self, detail: Any) -> None:  # noqa: N802 - named after the message
        self.reason = detail.reason
        self.facts.update(detail.metadata)

    def _take_RetryInfo(self, detail: Any) -> None:  # noqa: N802
        self.retry_after_s = max(0.0, detail.retry_delay.ToNanoseconds() / 1e9)

    def _take_BadRequest(self, detail: Any) -> None:  # noqa: N802
        if detail.field_violations:
            self.facts.setdefault("field", detail.field_violations[0].field)

    def _take_ResourceInfo(self, detail: Any) -> None:  # noqa: N802
        self.facts.setdefault("resource", detail.resource_name)

    def _take_RequestInfo(self, detail: Any) -> None:  # noqa: N802
        self.facts.setdefault("request_id", detail.request_id)

    def _take_QuotaFailure(self, detail: Any) -> None:  # noqa: N802
        self.quota = True
        if detail.violations:
            self.facts.setdefault("quota", detail.violations[0].description)


def _class_of_code(code: str, text: str, found: _Details) -> type[errors.CatenaryError]:
    if code == "UNKNOWN" and not found.reason and text in _CONNECTION_LOST:
        return errors.UnavailableError
    if code == "RESOURCE_EXHAUSTED":
        if found.quota:
            return errors.QuotaExceededError
        # gRPC itself says this when a message is over the limit of either side.
        if "larger than max" in text:
            return errors.PayloadTooLargeError
    return _CLASS_OF_CODE.get(code, errors.InternalError)


def _obey_pushback(error: errors.CatenaryError, trailers: Mapping[str, Any]) -> None:
    """Lets `grpc-retry-pushback-ms` replace any other advice (gRFC A6)."""
    raw = trailers.get(PUSHBACK_TRAILER)
    if raw is None:
        return
    try:
        milliseconds = int(raw)
    except ValueError:
        milliseconds = -1
    if milliseconds < 0:
        error.may_retry = False
    else:
        error.retry_after_s = milliseconds / 1e3
