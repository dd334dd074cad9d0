"""Scheduler groups: numbers that say which group something belongs to.

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
"""Scheduler groups of one cluster, at most."""
EPOCH_STRIDE: Final = MOST_GROUPS
"""Epochs of one of several groups are this far apart."""
EPOCH_LIMIT: Final = 1 << 40
"""No epoch is as high. A new leader every second, in each of 64 groups, takes 500 years to get
there; Redis' scripts count in doubles, which are exact up to 2^53."""
FARTHEST_EPOCH: Final = 1 << 32
"""Two epochs that are further apart were never of one history: one of them is damaged, or a lie."""
HIGHEST_GRANTED: Final = EPOCH_LIMIT - 2 * FARTHEST_EPOCH
"""What Redis or an agent says beyond this is not built upon: the next epochs would be no epochs."""
EPOCH_FIELD: Final = "hello.epoch"
"""What an agent is told that is wrong, if it obeys an epoch that cannot be."""
GROUP_METADATA: Final = "catenary-group"
"""gRPC metadata key that names the group a call is for; without it, group 0."""
AUTO: Final = "auto"
"""As a setting: the group is chosen by name, see `group_named`."""
_COUNTER_BITS: Final = 40
_EPOCH_BITS: Final = 23
"""Of an epoch, so many bits are in an id, which thus stays below 2^63; a multiple of the stride."""
_ORDINAL = re.compile(r"(\d{1,9})$")


def first_id(epoch: int) -> int:
    """Returns the first batch or session id of a term: epoch in the upper bits, then a counter.

    After 2^23 epochs they begin again: what had these ids is long over.
    """
    return epoch % (1 << _EPOCH_BITS) << _COUNTER_BITS | 1


def may_be_given_out(number: int, following: int, epoch: int) -> bool:
    """Returns False of a batch or session id that no leader can have given out until now.

    Args:
        number: The id.
        following: What the present leader gives out next.
        epoch: The present one. Once ids have begun again, those of a predecessor may be higher.
    """
    if number < following:
        return True
    return epoch >> _EPOCH_BITS > 0 and number >> _COUNTER_BITS != following >> _COUNTER_BITS


def group_of_id(number: int, groups: int) -> int:
    """Returns the group whose scheduler gave out a batch or session id."""
    return group_of_epoch(number >> _COUNTER_BITS, groups)


def group_of_epoch(epoch: int, groups: int) -> int:
    """Returns the group an epoch belongs to; in a cluster of one group every epoch is its own."""
    return epoch % EPOCH_STRIDE if groups > 1 else 0


def next_epoch(epoch: int, group: int, groups: int) -> int:
    """Returns the least epoch of a group that is greater than `epoch`."""
    if groups == 1:
        return epoch + 1
    return epoch + 1 + (group - epoch - 1) % EPOCH_STRIDE


def is_epoch(epoch: int) -> bool:
    """Returns True for what can be an epoch, or 0: none yet."""
    return 0 <= epoch < EPOCH_LIMIT


def group_named(name: str, groups: int) -> int:
    """Returns the group of whoever has this name: "agent-5" is dealt out by its number.

    A name without a number at its end is dealt out by a checksum, the same in every process.
    """
    ordinal = _ORDINAL.search(name)
    number = int(ordinal[1]) if ordinal else zlib.crc32(name.encode())
    return number % groups


def chosen_group(setting: str, name: str, groups: int) -> int:
    """Returns the group a setting names: "auto", or a number below `groups`.

    Raises:
        InvalidInput: neither of them.
    """
    if setting == AUTO:
        return group_named(name, groups)
    if not setting.isdecimal() or int(setting) >= groups:
        raise InvalidInput(
            "scheduler_group", f'must be "auto" or a number from 0 to {groups - 1}, not {setting!r}'
        )
    return int(setting)


def share_of(total: int, groups: int) -> int:
    """Returns how many of `total` every group has for certain when they are dealt out in turn."""
    return max(1, total // groups)


def metadata_of_group(group: int, groups: int) -> tuple[tuple[str, str], ...]:
    """Returns the gRPC metadata of a call for a group; none in a cluster of one group."""
    return ((GROUP_METADATA, str(group)),) if groups > 1 else ()
