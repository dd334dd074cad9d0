"""Finds the leader of this process that a call is for."""

from __future__ import annotations

from typing import Protocol, TypeVar

import grpc.aio

from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput

Context = grpc.aio.ServicerContext[object, object]
Leader_co = TypeVar("Leader_co", covariant=True)


class LeaderLookup(Protocol[Leader_co]):
    """Finds the leader of a group in this process; the type names the part that callers need."""

    def leader(self, group: int | None = None) -> Leader_co:
        """Returns the present leader of a group; of the lowest group led here if `group` is None.

        Raises:
            InvalidInput: There is no such group.
            Unavailable: This process does not lead the group.
        """
        ...


def group_of(context: Context) -> int | None:
    """Returns the scheduler group that a call is for; None if its metadata names none.

    Raises:
        InvalidInput: The metadata holds no number.
    """
    for key, value in context.invocation_metadata() or ():
        if key == GROUP_METADATA:
            if not str(value).isdecimal():
                raise InvalidInput(GROUP_METADATA, "must be a number")
            return int(value)
    return None
