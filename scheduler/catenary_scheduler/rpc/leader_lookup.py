"""Which leader of this process a call is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import grpc.aio

from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput

if TYPE_CHECKING:
    from catenary_scheduler.leadership.leader import LeaderRuntime

Context = grpc.aio.ServicerContext[object, object]


class LeaderLookup(Protocol):
    """Finds the leader of a group in this process."""

    def leader(self, group: int | None = None) -> LeaderRuntime:
        """Returns the present term of a group; without one, of the lowest that is led here.

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
