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
    """Root of all errors that a call raises on purpose.

    Attributes:
        reason: Stable upper-case name, e.g. "SLO_UNATTAINABLE".
        message: One sentence for people.
        retry_after_s: Seconds after which the server says to try again; None if it says nothing.
        may_retry: False if the server forbade another attempt outright.
        details: Facts for the reader, e.g. {"earliest_finish_ms": "41"}.
        code: Name of the gRPC status it came with; empty if it arose in the client.
        request_id: Id of the failed request, where it had one.
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
    """An error that the caller avoids by changing the request."""


class InvalidInputError(ClientError):
    """A tensor, shape, datatype, parameter or setting that is wrong; `field` names it."""

    reason = "INVALID_INPUT"

    @property
    def field(self) -> str:
        """The part of the request that is wrong, e.g. `inputs[0].shape`; empty if unknown."""
        return self.details.get("field", "")

    @classmethod
    def at(cls, field: str, message: str) -> InvalidInputError:
        """Returns the error for one field, found in the client before anything was sent."""
        return cls(f"{field}: {message}", details={"field": field})


class PayloadTooLargeError(ClientError):
    """A message that is larger than one side ever accepts."""

    reason = "PAYLOAD_TOO_LARGE"


class ModelNotFoundError(ClientError):
    """A model, or a version of it, that does not exist."""

    reason = "MODEL_NOT_FOUND"


class NotSupportedError(ClientError):
    """A part of the protocol that this server does not offer."""

    reason = "NOT_SUPPORTED"


class UnauthenticatedError(ClientError):
    """A call without an API key, or with an unknown one."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ClientError):
    """A call whose API key is known but lacks the scope."""

    reason = "PERMISSION_DENIED"


class RequestCancelledError(ClientError):
    """A call that was cancelled before it had an answer."""

    reason = "CANCELLED"


class OverloadError(CatenaryError):
    """An error of too much load: return after `retry_after_s`. Without it a retry does not help."""


class OverloadedError(OverloadError):
    """A bounded queue or buffer of the server that is full."""

    reason = "OVERLOADED"


class CacheFullError(OverloadError):
    """An agent's memory for caches that is full, while the session found no other place."""

    reason = "CACHE_FULL"


class SloUnattainableError(OverloadError):
    """A request that cannot finish in time, as the scheduler computes from the present book."""

    reason = "SLO_UNATTAINABLE"

    @property
    def earliest_finish_ms(self) -> float | None:
        """Milliseconds that the request would have taken, if the server said so."""
        try:
            return float(self.details["earliest_finish_ms"])
        except (KeyError, ValueError):
            return None


class QuotaExceededError(OverloadError):
    """An API key that has used up its share."""

    reason = "QUOTA_EXCEEDED"


class DeadlineExceededError(CatenaryError):
    """A request's SLO, its gRPC deadline or the client's time limit that has passed."""

    reason = "DEADLINE_EXCEEDED"

    @property
    def stage(self) -> str:
        """The step in which the request was when time ran out; empty if the server did not say."""
        return self.details.get("stage", "")


class PlanError(CatenaryError):
    """An error on which the operator must act, or on which the scheduler is about to act."""


class NoActivePlanError(PlanError):
    """A known model that nothing serves at present."""

    reason = "NO_ACTIVE_PLAN"


class PlanInfeasibleError(PlanError):
    """Constraints that no plan satisfies; the message names the first that fails."""

    reason = "PLAN_INFEASIBLE"


class ContentMismatchError(PlanError):
    """A model's file that is not what was recorded of it; the message says which, and where."""

    reason = "CONTENT_MISMATCH"


class CanaryFailedError(PlanError):
    """A device that computes wrongly: its answer to a fixed input differs from that of its kind."""

    reason = "CANARY_FAILED"


class StaleEpochError(PlanError):
    """An order of a scheduler that is no longer the leader."""

    reason = "STALE_EPOCH"


class PeerError(CatenaryError):
    """An error of another process that is gone or not ready."""


class UnavailableError(PeerError):
    """A server that cannot be reached, starts or drains, or a cluster between two leaders."""

    reason = "UNAVAILABLE"
    helps_to_repeat = True


class InvalidMessageError(PeerError):
    """A message between processes of the cluster with an impossible value; the details name it."""

    reason = "INVALID_MESSAGE"


class PartitionLostError(PeerError):
    """An agent or a link that was lost with work that could not be recovered in time."""

    reason = "PARTITION_LOST"
    helps_to_repeat = True


class DeviceFailedError(PeerError):
    """A device that failed to compute, without another device or time for a second try."""

    reason = "DEVICE_FAILED"
    helps_to_repeat = True


class DeviceLostError(PeerError):
    """A device that is lost to its agent, which restarts; no other could do the work in time."""

    reason = "DEVICE_LOST"
    helps_to_repeat = True


class DeviceOutOfMemoryError(PeerError):
    """A device without enough memory at the time, while no other could do the work."""

    reason = "DEVICE_OUT_OF_MEMORY"
    helps_to_repeat = True


class ProtocolError(PeerError):
    """An answer that does not follow the protocol, e.g. bytes that do not fit their shape."""

    reason = "PROTOCOL_ERROR"


class ComputeFailedError(CatenaryError):
    """A request that made several agents fail, and is therefore taken to be the cause."""

    reason = "COMPUTE_FAILED"


class InternalError(CatenaryError):
    """A bug on the server; its operator can find it by `details["request_id"]`."""

    reason = "INTERNAL"


def _leaves(cls: type[CatenaryError]) -> list[type[CatenaryError]]:
    below = [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]
    return below or [cls]


CLASS_OF_REASON: dict[str, type[CatenaryError]] = {
    cls.reason: cls for cls in _leaves(CatenaryError)
}
