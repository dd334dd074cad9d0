"""What became of a request, in one word: good, late, refused, or the client's own doing.

The headline of a model is good, late and refused of all that arrived. It is of use only if nothing
that went wrong can be missing from it: a gateway that turns away nine requests in ten and answers
the tenth in time is not fine. So every reason has a place in one table, and a reason that the table
lacks counts against the platform, as late.

The client's own requests in the wrong are outside: whoever sends nonsense, names a model that is
not there, has used up the quota that the operator gave the key, or hangs up, would otherwise make a
model look ill that answers everybody else in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from catenary_services import errors
from catenary_services.telemetry import names

OK = "OK"
"""The outcome of a request that was answered without an error."""


class Verdict(StrEnum):
    """What became of a request."""

    GOOD = names.GOOD
    """It was answered before its deadline and within its objectives."""
    LATE = names.LATE
    """It was accepted, and not answered in time: too slowly, not at all, or with an error."""
    REFUSED = names.REFUSED
    """It was turned away, because there was no room for it or nobody to serve it."""
    CLIENT = names.CLIENT
    """Its client is the reason that there is no answer; it counts for no share."""


_OF_REASON: dict[type[errors.CatenaryError], Verdict] = {
    # Its sender has to change something.
    errors.InvalidInput: Verdict.CLIENT,
    errors.PayloadTooLarge: Verdict.CLIENT,
    errors.ModelNotFound: Verdict.CLIENT,
    errors.NotSupported: Verdict.CLIENT,
    errors.Unauthenticated: Verdict.CLIENT,
    errors.PermissionDenied: Verdict.CLIENT,
    # A quota is the operator's word to one key; it says nothing of how busy the model is.
    errors.QuotaExceeded: Verdict.CLIENT,
    # See `verdict_of` for those who hung up because they had waited for too long.
    errors.RequestCancelled: Verdict.CLIENT,
    # There is no room, or it is too late for this one.
    errors.Overloaded: Verdict.REFUSED,
    errors.CacheFull: Verdict.REFUSED,
    errors.SloUnattainable: Verdict.REFUSED,
    # Nobody serves the model now; its client did nothing wrong.
    errors.Unavailable: Verdict.REFUSED,
    errors.NoActivePlan: Verdict.REFUSED,
    errors.PlanInfeasible: Verdict.REFUSED,
    errors.ContentMismatch: Verdict.REFUSED,
    errors.CanaryFailed: Verdict.REFUSED,
    # It was taken on.
    errors.DeadlineExceeded: Verdict.LATE,
    errors.PartitionLost: Verdict.LATE,
    errors.DeviceFailed: Verdict.LATE,
    errors.DeviceLost: Verdict.LATE,
    errors.DeviceOutOfMemory: Verdict.LATE,
    errors.StaleEpoch: Verdict.LATE,
    errors.InvalidMessage: Verdict.LATE,
    # It is taken to be the request's fault. If it is the model's, all of its requests end so, and
    # a model that answers nobody must not look well.
    errors.ComputeFailed: Verdict.LATE,
    errors.InternalError: Verdict.LATE,
}
VERDICTS: Mapping[str, Verdict] = MappingProxyType(
    {kind.reason: verdict for kind, verdict in _OF_REASON.items()}
)
"""The verdict on a request that ended with an error, by the reason of the error."""


def verdict_of(outcome: str, *, in_time: bool) -> Verdict:
    """Returns the verdict on a request.

    Args:
        outcome: "OK", or the reason of its error.
        in_time: False if it missed its deadline or an objective, or if its client went away when it
            had done so already. Those who hang up on a slow service are its fault; otherwise it
            would look the better the fewer wait for it.
    """
    if outcome == OK:
        return Verdict.GOOD if in_time else Verdict.LATE
    verdict = VERDICTS.get(outcome, Verdict.LATE)
    if outcome == errors.RequestCancelled.reason and not in_time:
        return Verdict.LATE
    return verdict
