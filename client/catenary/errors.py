"""Every error a call can raise, on one page, grouped by who must act.

    CatenaryError
    ├── ClientError       change the request: InvalidInputError, PayloadTooLargeError,
    │                     ModelNotFoundError, NotSupportedError, UnauthenticatedError,
    │                     PermissionDeniedError, RequestCancelledError
    ├── OverloadError     come back later: OverloadedError, SloUnattainableError,
    │                     QuotaExceededError
    ├── DeadlineExceededError
    ├── PlanError         the operator acts: NoActivePlanError, PlanInfeasibleError,
    │                     ContentMismatchError, CanaryFailedError, StaleEpochError
    ├── PeerError         another attempt may succeed: UnavailableError, PartitionLostError,
    │                     DeviceFailedError, DeviceLostError, DeviceOutOfMemoryError,
    │                     InvalidMessageError, ProtocolError
    ├── ComputeFailedError  the request makes agents fail
    └── InternalError     a bug on the server

Retry advice is data: `retry_after_s` says when, `retryable` says whether the same request may be
sent again. `reason` is the stable name that logs, metrics and HTTP bodies use too.
"""

from __future__ import annotations

from collections.abc import Mapping


class CatenaryError(Exception):
    """Root of everything a call raises on purpose.

    Attributes:
        reason: Stable upper-case name, e.g. "SLO_UNATTAINABLE".
        message: One sentence for people.
        retry_after_s: When the server says to try again; None if it says nothing.
        may_retry: False if the server forbade another attempt outright.
        details: Facts for the reader, e.g. {"earliest_finish_ms": "41"}.
        code: Name of the gRPC status it came with; empty if it arose on this side.
        request_id: The id the failed request travelled under, where it had one.
    """

    reason = "INTERNAL"
    helps_to_repeat = False

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        details: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.may_retry = True
        self.details: dict[str, str] = dict(details or {})
        self.code = code
        self.request_id = ""

    @property
    def retryable(self) -> bool:
        """Whether sending the same request again, after `retry_after_s`, may succeed."""
        return self.may_retry and (self.helps_to_repeat or self.retry_after_s is not None)


class ClientError(CatenaryError):
    """The caller must change the request."""


class InvalidInputError(ClientError):
    """A tensor, shape, datatype, parameter or setting is wrong; `field` names it."""

    reason = "INVALID_INPUT"

    @property
    def field(self) -> str:
        """The part of the request that is wrong, e.g. `inputs[0].shape`; empty if unknown."""
        return self.details.get("field", "")

    @classmethod
    def at(cls, field: str, message: str) -> InvalidInputError:
        """Returns the error for one field, found on this side before anything was sent."""
        return cls(f"{field}: {message}", details={"field": field})


class PayloadTooLargeError(ClientError):
    """The message is larger than one side accepts, however idle it is."""

    reason = "PAYLOAD_TOO_LARGE"


class ModelNotFoundError(ClientError):
    """No such model or version."""

    reason = "MODEL_NOT_FOUND"


class NotSupportedError(ClientError):
    """Part of the protocol that this server does not offer."""

    reason = "NOT_SUPPORTED"


class UnauthenticatedError(ClientError):
    """No key, or one nobody knows."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ClientError):
    """A known key without this scope."""

    reason = "PERMISSION_DENIED"


class RequestCancelledError(ClientError):
    """The call was cancelled before it had an answer."""

    reason = "CANCELLED"


class OverloadError(CatenaryError):
    """Come back later; `retry_after_s` says when. Without it another attempt does not help."""


class OverloadedError(OverloadError):
    """A bounded queue or buffer of the server is full."""

    reason = "OVERLOADED"


class CacheFullError(OverloadError):
    """An agent's memory for key-value caches is full, and the session found no other place."""

    reason = "CACHE_FULL"


class SloUnattainableError(OverloadError):
    """Computed by the scheduler: the request cannot finish in time on the present book."""

    reason = "SLO_UNATTAINABLE"

    @property
    def earliest_finish_ms(self) -> float | None:
        """How long the request would have taken, if the server said so."""
        try:
            return float(self.details["earliest_finish_ms"])
        except (KeyError, ValueError):
            return None


class QuotaExceededError(OverloadError):
    """This key has used up its share."""

    reason = "QUOTA_EXCEEDED"


class DeadlineExceededError(CatenaryError):
    """Time ran out: the request's SLO, its gRPC deadline, or the client's patience."""

    reason = "DEADLINE_EXCEEDED"

    @property
    def stage(self) -> str:
        """Where the request was when time ran out; empty if the server did not say."""
        return self.details.get("stage", "")


class PlanError(CatenaryError):
    """The operator must act, or the scheduler is about to."""


class NoActivePlanError(PlanError):
    """The model is known, but nothing serves it at present."""

    reason = "NO_ACTIVE_PLAN"


class PlanInfeasibleError(PlanError):
    """No plan satisfies the constraints; the message names the first that fails."""

    reason = "PLAN_INFEASIBLE"


class ContentMismatchError(PlanError):
    """A model's file is not what was recorded of it; the message says which, and where."""

    reason = "CONTENT_MISMATCH"


class CanaryFailedError(PlanError):
    """A device answers a fixed input otherwise than others of its kind."""

    reason = "CANARY_FAILED"


class StaleEpochError(PlanError):
    """An order of a scheduler that is no longer the leader."""

    reason = "STALE_EPOCH"


class PeerError(CatenaryError):
    """Another process is gone or not there yet."""


class UnavailableError(PeerError):
    """The server cannot be reached, is starting, draining, or between two leaders."""

    reason = "UNAVAILABLE"
    helps_to_repeat = True


class InvalidMessageError(PeerError):
    """A process of the cluster sent another what cannot be; `details["field"]` names it."""

    reason = "INVALID_MESSAGE"


class PartitionLostError(PeerError):
    """An agent or a link was lost and the work could not be recovered in time."""

    reason = "PARTITION_LOST"
    helps_to_repeat = True


class DeviceFailedError(PeerError):
    """A device failed to compute, and there was no other, or no time left, for another try."""

    reason = "DEVICE_FAILED"
    helps_to_repeat = True


class DeviceLostError(PeerError):
    """A device is lost to its agent, which is started anew; no other could do the work in time."""

    reason = "DEVICE_LOST"
    helps_to_repeat = True


class DeviceOutOfMemoryError(PeerError):
    """A device had not enough memory for this at the time, and no other could do it."""

    reason = "DEVICE_OUT_OF_MEMORY"
    helps_to_repeat = True


class ProtocolError(PeerError):
    """The answer does not follow the protocol, e.g. bytes that do not fit their shape."""

    reason = "PROTOCOL_ERROR"


class ComputeFailedError(CatenaryError):
    """The request made several agents fail: it, and none of them, is taken to be the cause."""

    reason = "COMPUTE_FAILED"


class InternalError(CatenaryError):
    """A bug on the server; `details["request_id"]` is what its owner needs to find it."""

    reason = "INTERNAL"


def _leaves(cls: type[CatenaryError]) -> list[type[CatenaryError]]:
    below = [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]
    return below or [cls]


CLASS_OF_REASON: dict[str, type[CatenaryError]] = {
    cls.reason: cls for cls in _leaves(CatenaryError)
}
