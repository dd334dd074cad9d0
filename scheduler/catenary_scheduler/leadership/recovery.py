"""Restores a new leader from the state that the last leader left.

Redis holds the desired state (deployments, placement), measurements, and the book as it was a few
milliseconds ago. Agents report the partitions and work that they hold, gateways the requests that
they wait for. Dispatching begins when the agents of the plan have reported, or after `recovery_s`
with those that have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import ResponseError

from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.quarantine import described
from catenary_scheduler.storage.script import pass_cancellation
from catenary_scheduler.storage.store import Store, StoredState
from catenary_scheduler.storage.stored_part import StoredPart, Unusable
from catenary_services.log import get_logger

_log = get_logger(__name__)
_FAILURES_TOLERATED = 2
"""After more failures in a row than this, a takeover puts the stored records away."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One step of taking over: it restores one part of a leader.

    Attributes:
        what: The name of the part, for people.
        restore: Restores the part from the stored state; returns what it could not use.
        must_work: True if an error is no fault of the stored state, so that it is raised.
    """

    what: str
    restore: Callable[[StoredState], Awaitable[Unusable] | Unusable]
    must_work: bool = False


def restoring(
    what: str,
    part: StoredPart[T],
    records_of: Callable[[StoredState], T],
    *,
    must_work: bool = False,
) -> RestoreStep:
    """Returns the step that restores a part from the records that `records_of` selects."""
    return RestoreStep(what, lambda stored: part.restore(records_of(stored)), must_work)


async def read_state(store: Store, lease: Lease, failures: int) -> StoredState:
    """Returns the state that a predecessor left, and moves unreadable records to the quarantine.

    Args:
        store: The store that holds the state.
        lease: The lease of this process.
        failures: The number of failures in a row to lead, whatever the reason. If leading keeps
            failing, the stored records are the likeliest cause, so all of them are put away.

    Raises:
        StaleEpoch: The lease is gone or held by another process.
    """
    stored = await store.load()
    if failures > _FAILURES_TOLERATED:
        _log.error("state_put_away", failures=failures)
        stored = stored.without_records()
    for table, count in Counter(each.table for each in stored.damage).items():
        mine = [each for each in stored.damage if each.table == table]
        names = described(mine)
        _log.warning("quarantined", table=table, names=names, count=count, why=mine[0].why)
    try:
        await store.put_away(stored.damage, lease)
    except ResponseError as error:  # perhaps an ACL forbids it; to lead matters more
        pass_cancellation()
        _log.warning("quarantine_failed", error=str(error))
    return stored


async def take_over(steps: Iterable[RestoreStep], stored: StoredState) -> list[str]:
    """Restores the parts of a new leader from the stored state, one after the other.

    Stored state may be readable and still make a step fail; then its part begins empty, as in a
    new cluster. Agents and gateways report what they hold, so only state that Redis alone knew is
    lost.

    Returns:
        The state that was left out and why, in words for people.

    Raises:
        InvalidInput: The plan file of our own settings is wrong.
    """
    problems: list[str] = []
    for step in steps:
        try:
            unusable = step.restore(stored)
            if isinstance(unusable, Awaitable):
                unusable = await unusable
            problems.extend(unusable or ())
        except Exception as error:  # of any kind: to lead without a part is better than not to lead
            if step.must_work:
                raise
            _log.exception("not_taken_over", part=step.what)
            problems.append(f"{step.what}: {type(error).__name__}: {error}")
    return problems
