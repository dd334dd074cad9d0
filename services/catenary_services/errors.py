"""The one error tree, grouped by who must act. `error_tables` maps it to gRPC and HTTP.

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
    """The caller must change the request."""


class InvalidInput(ClientError):
    """A tensor, shape, datatype or parameter is wrong; `details["field"]` names it."""

    reason = "INVALID_INPUT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", details={"field": field})
        self.field = field


class PayloadTooLarge(ClientError):
    """The request is larger than this server accepts, however empty it is."""

    reason = "PAYLOAD_TOO_LARGE"


class ModelNotFound(ClientError):
    """No such model or version."""

    reason = "MODEL_NOT_FOUND"


class NotSupported(ClientError):
    """Part of the protocol that this server does not offer."""

    reason = "NOT_SUPPORTED"


class Unauthenticated(ClientError):
    """No key, or one nobody knows."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(ClientError):
    """A known key without this scope."""

    reason = "PERMISSION_DENIED"


class RequestCancelled(ClientError):
    """The caller went away."""

    reason = "CANCELLED"


class OverloadError(CatenaryError):
    """The caller should come back later; `retry_after_ns` says when."""


class Overloaded(OverloadError):
    """A bounded queue or buffer is full."""

    reason = "OVERLOADED"


class CacheFull(OverloadError):
    """An agent's memory for key-value caches is full; the session goes on elsewhere, or later."""

    reason = "CACHE_FULL"


class SloUnattainable(OverloadError):
    """Computed: the request cannot finish within its deadline on the present book."""

    reason = "SLO_UNATTAINABLE"


class QuotaExceeded(OverloadError):
    """This key has used up its share."""

    reason = "QUOTA_EXCEEDED"


class DeadlineError(CatenaryError):
    """Time ran out."""


class DeadlineExceeded(DeadlineError):
    """The deadline passed while the request was worked on; `details["stage"]` says where."""

    reason = "DEADLINE_EXCEEDED"


class PlanError(CatenaryError):
    """The operator must act, or the scheduler is about to."""


class NoActivePlan(PlanError):
    """The model is known, but nothing serves it at present."""

    reason = "NO_ACTIVE_PLAN"


class PlanInfeasible(PlanError):
    """No plan satisfies the constraints; the message names the first that fails."""

    reason = "PLAN_INFEASIBLE"


class ContentMismatch(PlanError):
    """A model's file is not what was recorded; the message names file, digests and machine."""

    reason = "CONTENT_MISMATCH"


class CanaryFailed(PlanError):
    """A device answers a fixed input otherwise than others of its kind: it computes wrongly."""

    reason = "CANARY_FAILED"


class StaleEpoch(PlanError):
    """An order or frame of a scheduler that is no longer the leader."""

    reason = "STALE_EPOCH"


class PeerError(CatenaryError):
    """Another process is gone or not there yet; another attempt may succeed."""


class Unavailable(PeerError):
    """Starting, draining, or between two leaders."""

    reason = "UNAVAILABLE"


class PartitionLost(PeerError):
    """An agent or a link was lost and the work could not be recovered in time."""

    reason = "PARTITION_LOST"


class InvalidMessage(PeerError):
    """A message inside the cluster says what cannot be; it is named, and so is its field."""

    reason = "INVALID_MESSAGE"

    def __init__(
        self, kind: str, field: str, why: str, *, retry_after_ns: int | None = None
    ) -> None:
        place = f"{kind}.{field}" if field else kind
        text = f"{place}: {why}"
        super().__init__(text, retry_after_ns=retry_after_ns, details={"field": place})
        self.field = field


class DeviceFailed(PeerError):
    """An agent's device failed to compute; elsewhere it may not."""

    reason = "DEVICE_FAILED"


class DeviceLost(PeerError):
    """An agent can compute nothing on its device any more; its process ends and is started anew."""

    reason = "DEVICE_LOST"


class DeviceOutOfMemory(PeerError):
    """An agent's device has not enough memory for this now; elsewhere there may be more."""

    reason = "DEVICE_OUT_OF_MEMORY"


class ComputeFailed(CatenaryError):
    """The request made several agents fail: it, and none of them, is taken to be the cause."""

    reason = "COMPUTE_FAILED"


class InternalError(CatenaryError):
    """Our bug. Carries nothing but an id to find it by."""

    reason = "INTERNAL"


def forget_frames(error: BaseException) -> None:
    """Lets go of what an error that was answered holds through its tracebacks: whole bodies.

    An error that a frame of its own traceback names is a cycle, which only the garbage collector
    would end, later.
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
