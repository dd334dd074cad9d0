"""Builds the dispatcher that the settings describe."""

from __future__ import annotations

from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import ChainedDispatcher, CombinedDispatcher, PooledDispatcher
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.settings import SchedulerSettings


def dispatcher_of(
    settings: SchedulerSettings,
    book: Book,
    availability: Availability,
    times: BookedTimes,
    first_id: int,
) -> CombinedDispatcher:
    """Returns a dispatcher without a plan.

    Args:
        settings: Limits and policies.
        book: The book that its reservations are entered in.
        availability: Says which agents can be given work.
        times: Recent durations of work, which reservations are made for.
        first_id: Smallest id of its batches and of its sessions.
    """
    pooled = PooledDispatcher(
        settings.dispatching(),
        book=book,
        availability=availability,
        times=times,
        first_batch=first_id,
    )
    chained = ChainedDispatcher(
        settings.dispatching_sessions(),
        book,
        availability=availability,
        policy=settings.chain_policy,
        first_session=first_id,
    )
    return CombinedDispatcher(pooled, chained, book)
