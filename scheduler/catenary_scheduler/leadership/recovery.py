"""How a new leader goes on where the last one stopped.

Redis knows what should be (deployments, placement), what was measured, and the book up to a few
milliseconds ago. Agents report what they host and hold, gateways what they wait for. Dispatching
begins when the agents of the plan have reported, or after `recovery_s` with those that have.
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
"""After so many failures with what is stored it is tried without."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One part of taking over.

    Attributes:
        what: Its name, for people.
        restore: Does it, with all that is stored; returns what of it could not be used.
        must_work: What goes wrong is no fault of what is stored, and passes on.
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
    """Returns the step that restores a part from its records."""
    return RestoreStep(what, lambda stored: part.restore(records_of(stored)), must_work)


async def read_state(store: Store, lease: Lease, failures: int) -> StoredState:
    """Returns what a predecessor left, with what is unreadable put into the quarantine.

    Args:
        store: Where it is.
        lease: Ours.
        failures: How often taking over failed just now, whatever for. If it keeps failing, what
            is stored is the likeliest cause: then all of it is put away.

    Raises:
        StaleEpoch: the lease is gone or somebody else's.
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
    except ResponseError as error:  # perhaps an ACL file that grants less: to lead matters more
        pass_cancellation()
        _log.warning("quarantine_failed", error=str(error))
    return stored


async def take_over(steps: Iterable[RestoreStep], stored: StoredState) -> list[str]:
    """Fills the parts of a new leader from what is stored, one after the other.

    What is stored may be readable and still make a part of this fail: then that part begins empty,
    as on the first day. Agents and gateways report what they hold, so nothing is lost that way but
    what only Redis knew.

    Returns:
        What was left out and why, in words for people.

    Raises:
        InvalidInput: the plan file of our own settings is wrong.
    """
    problems: list[str] = []
    for step in steps:
        try:
            unusable = step.restore(stored)
            if isinstance(unusable, Awaitable):
                unusable = await unusable
            problems.extend(unusable or ())
        except Exception as error:  # whatever it is: to go on without is better than not to lead
            if step.must_work:
                raise
            _log.exception("not_taken_over", part=step.what)
            problems.append(f"{step.what}: {type(error).__name__}: {error}")
    return problems
