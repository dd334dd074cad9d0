"""Kinds of outcomes: a request was good, late, refused, or failed by its client's own doing.

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


class OutcomeKind(StrEnum):
    """The kind of outcome that a request had."""

    GOOD = names.GOOD
    """Requests that were answered before their deadline and within their objectives."""
    LATE = names.LATE
    """Requests that were accepted, and answered too late, not at all, or with an error."""
    REFUSED = names.REFUSED
    """Requests that were turned away: no room for them, or nobody to serve them."""
    CLIENT = names.CLIENT
    """Requests whose client is the reason that there is no answer; they count for no share."""


_OF_REASON: dict[type[errors.CatenaryError], OutcomeKind] = {
    # Its sender has to change something.
    errors.InvalidInput: OutcomeKind.CLIENT,
    errors.PayloadTooLarge: OutcomeKind.CLIENT,
    errors.ModelNotFound: OutcomeKind.CLIENT,
    errors.NotSupported: OutcomeKind.CLIENT,
    errors.Unauthenticated: OutcomeKind.CLIENT,
    errors.PermissionDenied: OutcomeKind.CLIENT,
    # A quota is the operator's word to one key; it says nothing of how busy the model is.
    errors.QuotaExceeded: OutcomeKind.CLIENT,
    # See `kind_of` for those who hung up because they had waited for too long.
    errors.RequestCancelled: OutcomeKind.CLIENT,
    # There is no room, or it is too late for this one.
    errors.Overloaded: OutcomeKind.REFUSED,
    errors.CacheFull: OutcomeKind.REFUSED,
    errors.SloUnattainable: OutcomeKind.REFUSED,
    # Nobody serves the model now; its client did nothing wrong.
    errors.Unavailable: OutcomeKind.REFUSED,
    errors.NoActivePlan: OutcomeKind.REFUSED,
    errors.PlanInfeasible: OutcomeKind.REFUSED,
    errors.ContentMismatch: OutcomeKind.REFUSED,
    errors.CanaryFailed: OutcomeKind.REFUSED,
    # It was taken on.
    errors.DeadlineExceeded: OutcomeKind.LATE,
    errors.PartitionLost: OutcomeKind.LATE,
    errors.DeviceFailed: OutcomeKind.LATE,
    errors.DeviceLost: OutcomeKind.LATE,
    errors.DeviceOutOfMemory: OutcomeKind.LATE,
    errors.StaleEpoch: OutcomeKind.LATE,
    errors.InvalidMessage: OutcomeKind.LATE,
    # It is taken to be the request's fault. If it is the model's, all of its requests end so, and
    # a model that answers nobody must not look well.
    errors.ComputeFailed: OutcomeKind.LATE,
    errors.InternalError: OutcomeKind.LATE,
}
KINDS: Mapping[str, OutcomeKind] = MappingProxyType(
    {error.reason: kind for error, kind in _OF_REASON.items()}
)
"""The kind of outcome of a request that ended with an error, by the reason of the error."""


def kind_of(outcome: str, *, in_time: bool) -> OutcomeKind:
    """Returns the kind of outcome that a request had.

    Args:
        outcome: "OK", or the reason of its error.
        in_time: False if it missed its deadline or an objective, or if its client went away when it
            had done so already. Those who hang up on a slow service are its fault; otherwise it
            would look the better the fewer wait for it.
    """
    if outcome == OK:
        return OutcomeKind.GOOD if in_time else OutcomeKind.LATE
    kind = KINDS.get(outcome, OutcomeKind.LATE)
    if outcome == errors.RequestCancelled.reason and not in_time:
        return OutcomeKind.LATE
    return kind
