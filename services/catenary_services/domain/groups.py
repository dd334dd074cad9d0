"""Scheduler groups: ids and epochs that tell which group of a divided cluster they belong to.

A cluster may be divided among several schedulers, each with a *group* of agents of its own. A group
has its own lease, and epochs of its own; yet no epoch is ever that of two groups: those of group g
leave the remainder g when divided by `EPOCH_STRIDE`. Ids of batches and sessions begin with an
epoch, so they are unique in the whole cluster, and everyone can tell whose they are.
A cluster of one group counts its epochs 1, 2, 3, as if there were no groups.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

from catenary_services.errors import InvalidInput

MOST_GROUPS: Final = 64
"""The most scheduler groups a cluster can have."""
EPOCH_STRIDE: Final = MOST_GROUPS
"""Consecutive epochs of one group are this far apart where there are several groups."""
EPOCH_LIMIT: Final = 1 << 40
"""Every epoch is below this. With a new leader every second in each of 64 groups it would be
reached after 500 years; Redis' scripts count in doubles, which are exact up to 2^53."""
FARTHEST_EPOCH: Final = 1 << 32
"""Two epochs that are further apart never belong to one history: one of them is damaged or forged.
"""
HIGHEST_GRANTED: Final = EPOCH_LIMIT - 2 * FARTHEST_EPOCH
"""Epochs above this are not accepted from Redis or an agent: their successors would pass the limit.
"""
EPOCH_FIELD: Final = "hello.epoch"
"""The field that the error names for an agent which reports an impossible epoch."""
GROUP_METADATA: Final = "catenary-group"
"""gRPC metadata key that names the group a call is for; without it, group 0."""
AUTO: Final = "auto"
"""The value of a setting that has the group chosen by the name of the process; see `group_named`.
"""
_COUNTER_BITS: Final = 40
_EPOCH_BITS: Final = 23
"""The number of bits of an epoch in an id, which keeps ids below 2^63."""
_ORDINAL = re.compile(r"(\d{1,9})$")


def first_id(epoch: int) -> int:
    """Returns the first batch or session id of an epoch: epoch in the upper bits, then a counter.

    The epoch bits begin again after 2^23 epochs, when whatever had the same ids is long over.
    """
    return epoch % (1 << _EPOCH_BITS) << _COUNTER_BITS | 1


def may_be_given_out(number: int, following: int, epoch: int) -> bool:
    """Returns False for a batch or session id that no leader can have given out so far.

    Args:
        number: The id.
        following: The next id that the present leader gives out.
        epoch: The present epoch. Once the epoch bits have begun again, ids of a predecessor may be
            higher than those of the present leader.
    """
    if number < following:
        return True
    return epoch >> _EPOCH_BITS > 0 and number >> _COUNTER_BITS != following >> _COUNTER_BITS


def group_of_id(number: int, groups: int) -> int:
    """Returns the group whose scheduler gave out a batch or session id."""
    return group_of_epoch(number >> _COUNTER_BITS, groups)


def group_of_epoch(epoch: int, groups: int) -> int:
    """Returns the group an epoch belongs to; always 0 in a cluster of one group."""
    return epoch % EPOCH_STRIDE if groups > 1 else 0


def next_epoch(epoch: int, group: int, groups: int) -> int:
    """Returns the least epoch of a group that is greater than `epoch`."""
    if groups == 1:
        return epoch + 1
    return epoch + 1 + (group - epoch - 1) % EPOCH_STRIDE


def is_epoch(epoch: int) -> bool:
    """Returns True for a number that can be an epoch, and for 0, which stands for none yet."""
    return 0 <= epoch < EPOCH_LIMIT


def group_named(name: str, groups: int) -> int:
    """Returns the group of a process by its name: "agent-5" belongs to group 5 modulo `groups`.

    A name without a number at its end is assigned by a checksum, the same in every process.
    """
    ordinal = _ORDINAL.search(name)
    number = int(ordinal[1]) if ordinal else zlib.crc32(name.encode())
    return number % groups


def chosen_group(setting: str, name: str, groups: int) -> int:
    """Returns the group that a setting names: "auto", or a number below `groups`.

    Raises:
        InvalidInput: The setting is neither.
    """
    if setting == AUTO:
        return group_named(name, groups)
    if not setting.isdecimal() or int(setting) >= groups:
        raise InvalidInput(
            "scheduler_group", f'must be "auto" or a number from 0 to {groups - 1}, not {setting!r}'
        )
    return int(setting)


def share_of(total: int, groups: int) -> int:
    """Returns how many of `total` things each group gets at least, if dealt out in turn."""
    return max(1, total // groups)


def metadata_of_group(group: int, groups: int) -> tuple[tuple[str, str], ...]:
    """Returns the gRPC metadata of a call for a group; none in a cluster of one group."""
    return ((GROUP_METADATA, str(group)),) if groups > 1 else ()
