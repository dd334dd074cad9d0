"""The tree of errors, grouped by who must act; `error_tables` maps it to gRPC and HTTP.

An error crosses processes as its `reason` and message (`catenary.v1.Failure`); `error_of_reason`
turns it back into the same class on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping


class CatenaryError(Exception):
    """Root of everything the platform raises on purpose.

    Attributes:
        reason: Stable upper-case name, the same in gRPC details, HTTP bodies, logs and metrics.
        retry_after_ns: When to try again; None if retrying the same thing does not help.
        details: Facts for the reader, e.g. {"field": "inputs[0].shape"}.
    """

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        retry_after_ns: int | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ns = retry_after_ns
        self.details: dict[str, str] = dict(details or {})


class ClientError(CatenaryError):
    """An error that the caller avoids by changing the request."""


class InvalidInput(ClientError):
    """A tensor, shape, datatype or parameter that is wrong; `details["field"]` names it."""

    reason = "INVALID_INPUT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", details={"field": field})
        self.field = field


class PayloadTooLarge(ClientError):
    """A request that is larger than this server ever accepts."""

    reason = "PAYLOAD_TOO_LARGE"


class ModelNotFound(ClientError):
    """A model, or a version of it, that does not exist."""

    reason = "MODEL_NOT_FOUND"


class NotSupported(ClientError):
    """A part of the protocol that this server does not offer."""

    reason = "NOT_SUPPORTED"


class Unauthenticated(ClientError):
    """A call without an API key, or with an unknown one."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(ClientError):
    """A call whose API key is known but lacks the scope."""

    reason = "PERMISSION_DENIED"


class RequestCancelled(ClientError):
    """A request whose caller went away."""

    reason = "CANCELLED"


class OverloadError(CatenaryError):
    """An error of too much load: the caller should return after `retry_after_ns`."""


class Overloaded(OverloadError):
    """A bounded queue or buffer that is full."""

    reason = "OVERLOADED"


class CacheFull(OverloadError):
    """An agent's memory for key-value caches that is full.

    The session goes on elsewhere, or later.
    """

    reason = "CACHE_FULL"


class SloUnattainable(OverloadError):
    """A request that cannot finish within its deadline, as computed from the present book."""

    reason = "SLO_UNATTAINABLE"


class QuotaExceeded(OverloadError):
    """An API key that has used up its share."""

    reason = "QUOTA_EXCEEDED"


class DeadlineError(CatenaryError):
    """An error of time that ran out."""


class DeadlineExceeded(DeadlineError):
    """A deadline that passed during a request; `details["stage"]` says in which step."""

    reason = "DEADLINE_EXCEEDED"


class PlanError(CatenaryError):
    """An error on which the operator must act, or on which the scheduler is about to act."""


class NoActivePlan(PlanError):
    """A known model that nothing serves at present."""

    reason = "NO_ACTIVE_PLAN"


class PlanInfeasible(PlanError):
    """Constraints that no plan satisfies; the message names the first that fails."""

    reason = "PLAN_INFEASIBLE"


class ContentMismatch(PlanError):
    """A model's file that is not what was recorded; the message names file, digests and machine."""

    reason = "CONTENT_MISMATCH"


class CanaryFailed(PlanError):
    """A device that computes wrongly: its answer to a fixed input differs from that of its kind."""

    reason = "CANARY_FAILED"


class StaleEpoch(PlanError):
    """An order or a frame of a scheduler that is no longer the leader."""

    reason = "STALE_EPOCH"


class PeerError(CatenaryError):
    """An error of another process that is gone or not ready; another attempt may succeed."""


class Unavailable(PeerError):
    """A process that starts or drains, or a cluster between two leaders."""

    reason = "UNAVAILABLE"


class PartitionLost(PeerError):
    """An agent or a link that was lost with work that could not be recovered in time."""

    reason = "PARTITION_LOST"


class InvalidMessage(PeerError):
    """A message inside the cluster with an impossible value; the error names message and field."""

    reason = "INVALID_MESSAGE"

    def __init__(
        self, kind: str, field: str, why: str, *, retry_after_ns: int | None = None
    ) -> None:
        place = f"{kind}.{field}" if field else kind
        text = f"{place}: {why}"
        super().__init__(text, retry_after_ns=retry_after_ns, details={"field": place})
        self.field = field


class DeviceFailed(PeerError):
    """A device that failed to compute; on another device the work may succeed."""

    reason = "DEVICE_FAILED"


class DeviceLost(PeerError):
    """A device that can compute nothing any more; its agent's process ends and is started anew."""

    reason = "DEVICE_LOST"


class DeviceOutOfMemory(PeerError):
    """A device without enough memory at present; elsewhere there may be more."""

    reason = "DEVICE_OUT_OF_MEMORY"


class ComputeFailed(CatenaryError):
    """A request that made several agents fail, and is therefore taken to be the cause."""

    reason = "COMPUTE_FAILED"


class InternalError(CatenaryError):
    """A bug of this project. Callers get nothing but an id by which the log has it."""

    reason = "INTERNAL"


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that was answered, and with them whole request bodies.

    An error that a frame of its own traceback names is part of a reference cycle. Without this, the
    garbage collector would free it later.
    """
    found: BaseException | None = error
    while found is not None and found.__traceback__ is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def _leaves(cls: type[CatenaryError]) -> list[type[CatenaryError]]:
    below = [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]
    return below if below else [cls]


_CLASS_OF_REASON = {cls.reason: cls for cls in _leaves(CatenaryError)}


def error_of_reason(
    reason: str,
    message: str,
    *,
    retry_after_ns: int | None = None,
    details: Mapping[str, str] | None = None,
) -> CatenaryError:
    """Returns the error another process described; an unknown reason becomes `InternalError`."""
    cls = _CLASS_OF_REASON.get(reason, InternalError)
    facts = dict(details or {})
    if cls is InvalidInput:
        error: CatenaryError = InvalidInput(facts.get("field", "request"), message)
        error.message = message
        error.args = (message,)
        return error
    if cls is InvalidMessage:
        kind, _, field = facts.get("field", "").partition(".")
        error = InvalidMessage(kind, field, "", retry_after_ns=retry_after_ns)
        error.message = message
        error.args = (message,)
        return error
    return cls(message, retry_after_ns=retry_after_ns, details=facts)
