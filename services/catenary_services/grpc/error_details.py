"""The `google.rpc` details of an error, each made by one small function for `error_tables`.

Every text is clipped, because trailers share 8 KiB of headers and peers drop the whole status of a
longer set.
"""

from __future__ import annotations

import re

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from catenary_services.errors import CatenaryError, InternalError

DOMAIN = "catenary"
"""The domain in every `google.rpc.ErrorInfo`."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""The trailer that carries the details, packed in a `google.rpc.Status`."""

_LONGEST_MESSAGE_BYTES = 1_000
_LONGEST_FACT_BYTES = 200
_LONGEST_KEY_BYTES = 64
_MOST_FACTS = 8
_ANONYMOUS = re.compile(r"internal error(, id [0-9a-f]{12})?")


def public_message(error: CatenaryError) -> str:
    """Returns the message that clients may read: of an internal error, only its id."""
    if isinstance(error, InternalError):
        return error.message if is_anonymous(error.message) else "internal error"
    return _clip(error.message, _LONGEST_MESSAGE_BYTES)


def is_anonymous(message: str) -> bool:
    """True if an internal error's message has nothing in it but an id."""
    return _ANONYMOUS.fullmatch(message) is not None


def error_info(error: CatenaryError, _: int | None) -> Message:
    """Returns the detail with the reason and the facts of an error."""
    facts = list(error.details.items())[:_MOST_FACTS]
    detail: Message = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={_clip(key, _LONGEST_KEY_BYTES): _fact(value) for key, value in facts},
    )
    return detail


def bad_request(error: CatenaryError, _: int | None) -> Message:
    """Returns the detail with the wrong field and what is wrong with it."""
    field = error.details.get("field", "")
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_fact(field), description=public_message(error).removeprefix(f"{field}: ")
    )
    detail: Message = error_details_pb2.BadRequest(field_violations=[violation])
    return detail


def resource(error: CatenaryError, _: int | None) -> Message:
    """Returns the detail with the model that does not exist."""
    detail: Message = error_details_pb2.ResourceInfo(
        resource_type="model",
        resource_name=_fact(error.details.get("model", "")),
        description=public_message(error),
    )
    return detail


def precondition(error: CatenaryError, _: int | None) -> Message:
    """Returns the detail with what has to be done first."""
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=error.reason,
        subject=_fact(error.details.get("model", "")),
        description=public_message(error),
    )
    detail: Message = error_details_pb2.PreconditionFailure(violations=[violation])
    return detail


def quota(error: CatenaryError, _: int | None) -> Message:
    """Returns the detail with the key or address whose share is used up."""
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_fact(error.details.get("subject", "")), description=public_message(error)
    )
    detail: Message = error_details_pb2.QuotaFailure(violations=[violation])
    return detail


def retry(_: CatenaryError, wait_ns: int | None) -> Message | None:
    """Returns the detail with the time to wait before a retry, None if a retry does not help."""
    if wait_ns is None:
        return None
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(wait_ns)
    detail: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return detail


def request_info(error: CatenaryError, _: int | None) -> Message | None:
    """Returns the detail with the id of an internal error, None if it has no id."""
    request_id = error.details.get("request_id") or error.details.get("error_id")
    if not request_id:
        return None
    detail: Message = error_details_pb2.RequestInfo(request_id=_fact(request_id))
    return detail


def _fact(text: str) -> str:
    return _clip(text, _LONGEST_FACT_BYTES)


def _clip(text: str, longest_bytes: int) -> str:
    """Shortens a text by its bytes, which percent-encoding in a status message triples."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= longest_bytes:
        return encoded.decode("utf-8")
    return encoded[: longest_bytes - 3].decode("utf-8", "ignore") + "..."
