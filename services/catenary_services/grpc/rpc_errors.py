"""Conversion of a failed gRPC call into the error that the other process raised."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from catenary_services import errors
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_details import DOMAIN, STATUS_DETAILS_KEY

# For calls that failed without details of `error_tables`: by the transport, or at foreign servers.
_REASON_OF_CODE: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput.reason,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound.reason,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotSupported.reason,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated.reason,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied.reason,
    grpc.StatusCode.CANCELLED: errors.RequestCancelled.reason,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded.reason,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded.reason,
    grpc.StatusCode.FAILED_PRECONDITION: errors.NoActivePlan.reason,
    grpc.StatusCode.ABORTED: errors.StaleEpoch.reason,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable.reason,
}


def error_of_rpc(exc: grpc.aio.AioRpcError) -> CatenaryError:
    """Returns the error of a failed call to another process, by its details or its status code."""
    status = _status_in(exc.trailing_metadata() or ())
    reason = _REASON_OF_CODE.get(exc.code(), errors.InternalError.reason)
    return _error_of(reason, exc.details() or "", status)


def error_of_status(data: bytes) -> CatenaryError:
    """Returns the error in a serialized `google.rpc.Status`; the inverse of `rpc_status`.

    Raises:
        InvalidMessage: The bytes are none.
    """
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        raise errors.InvalidMessage("Status", "", "cannot be read") from None
    code = next((each for each in grpc.StatusCode if each.value[0] == status.code), None)
    reason = errors.InternalError.reason
    if code is not None:
        reason = _REASON_OF_CODE.get(code, reason)
    return _error_of(reason, status.message, status)


def _error_of(reason: str, message: str, status: status_pb2.Status | None) -> CatenaryError:
    facts: dict[str, str] = {}
    wait_ns: int | None = None
    for packed in status.details if status else ():
        info, retry, bad = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.RetryInfo(),
            error_details_pb2.BadRequest(),
        )
        if packed.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
            facts.update(info.metadata)
        elif packed.Unpack(retry):
            wait_ns = retry.retry_delay.ToNanoseconds()
        elif packed.Unpack(bad) and bad.field_violations:
            facts["field"] = bad.field_violations[0].field
    error = errors.error_of_reason(reason, message, retry_after_ns=wait_ns, details=facts)
    error.details.update(facts)
    return error


def _status_in(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
