"""Which leader of this process a call is for."""

from __future__ import annotations

from typing import Protocol, TypeVar

import grpc.aio

from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput

Context = grpc.aio.ServicerContext[object, object]
Leader_co = TypeVar("Leader_co", covariant=True)


class LeaderLookup(Protocol[Leader_co]):
    """Finds the leader of a group in this process, or what the caller needs of one."""

    def leader(self, group: int | None = None) -> Leader_co:
        """Returns the present leader of a group; without one, of the lowest that is led here.

        Raises:
            InvalidInput: there is no such group.
            Unavailable: this process does not lead it.
        """
        ...


def group_of(context: Context) -> int | None:
    """Returns the scheduler group a call is for, None if it does not say.

    Raises:
        InvalidInput: what it says is no number.
    """
    for key, value in context.invocation_metadata() or ():
        if key == GROUP_METADATA:
            if not str(value).isdecimal():
                raise InvalidInput(GROUP_METADATA, "must be a number")
            return int(value)
    return None
