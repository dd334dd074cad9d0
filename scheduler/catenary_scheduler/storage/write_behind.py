"""Empties the journal into Redis several times a second and keeps the lease, across outages.

Nobody waits for this task. While Redis is away the leader goes on dispatching from memory. When it
is back, the lease decides: if it is still ours, the term goes on; if it is free and nobody led in
between, it is taken with a higher epoch and everything is written anew; otherwise the term is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from catenary_scheduler.storage.journal import Journal, JournalChanges
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.script import pass_cancellation
from catenary_scheduler.storage.store import Store, StoreBehind
from catenary_services.domain.groups import HIGHEST_GRANTED
from catenary_services.domain.ids import Epoch
from catenary_services.errors import StaleEpoch
from catenary_services.log import get_logger
from catenary_services.redis.redis_client import problem_of
from catenary_services.telemetry.metrics import Metrics

_REDIS_FAILURES = (RedisError, OSError, TimeoutError)
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FlushSchedule:
    """Intervals of the write-behind task, in seconds."""

    flush_s: float = 0.05
    """Changes that come within this time are written in one batch. It is longer than reports of
    agents linger, so that most batches of rows come and go between two flushes."""
    renew_s: float = 0.5
    """Interval between renewals of the lease."""
    longest_backoff_s: float = 1.0
    """The longest pause between attempts to reach Redis again."""


@dataclass(frozen=True, slots=True)
class StateSources:
    """Callbacks that provide the state to write, and that hear of changes of leadership."""

    collect: Callable[[], None]
    """Moves what changed since the last call into the journal."""
    snapshot: Callable[[], JournalChanges]
    """Returns the whole state of this very moment, with `replace` set."""
    epoch_raised: Callable[[Epoch], None]
    """Called when the lease had to be taken again: orders must carry this higher epoch."""
    failed: Callable[[str], None] = lambda _kind: None
    """Called with a word for what went wrong
    (`catenary_services.redis.redis_client.problem_of`)."""


class WriteBehind:
    """The task through which one leader writes to Redis and keeps its lease.

    Attributes:
        connected: False while Redis does not answer, or takes no writes.
        problem: The reason in one line; empty while connected.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        journal: Journal,
        sources: StateSources,
        schedule: FlushSchedule,
    ) -> None:
        self._store = store
        self._lease = lease
        self._journal = journal
        self._sources = sources
        self._schedule = schedule
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        """Set when the lease is to be renewed or something to be written. The first change waits a
        moment for others to join it."""
        self._work.set()
        self._touched = False
        self._must_renew = True
        self._renewal: asyncio.TimerHandle | None = None
        self._beyond = 0
        self._backoff_s = 0.0
        self._kind = ""
        self.connected = True
        self.problem = ""

    def touch(self) -> None:
        """Announces a change; it is written within a flush interval or two."""
        if not self._touched:
            self._touched = True
            self._loop.call_later(self._schedule.flush_s, self._work.set)

    def go_beyond(self, epoch: int, *, shared: bool = False) -> None:
        """Makes the epoch exceed one that an agent obeys: Redis must have lost its last writes.

        Args:
            epoch: The epoch that the agent obeys.
            shared: True if another leader has that epoch: then ours must exceed it even if equal.
        """
        if epoch > HIGHEST_GRANTED:
            return  # no leader could be granted a higher one
        if epoch > self._lease.epoch or (shared and epoch == self._lease.epoch):
            self._beyond = max(self._beyond, epoch)
            self._work.set()

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            StaleEpoch: This process no longer leads.
        """
        while True:
            try:
                await self._work.wait()
                await self._beat(self._loop.time())
            except _REDIS_FAILURES as failure:
                pass_cancellation()
                await self._back_off(failure)

    def export(self, metrics: Metrics) -> None:
        """Shows whether Redis answers, and how much waits for it."""
        metrics.redis_connected.set(self.connected)
        metrics.redis_pending.set(len(self._journal))

    async def flush(self) -> None:
        """Writes what is pending now.

        Raises:
            RedisError: The connection failed.
            StaleEpoch: This process no longer leads.
        """
        self._sources.collect()
        if self._journal:
            await self._write()

    def _let_renew(self) -> None:
        self._must_renew = True
        self._work.set()

    async def _beat(self, began: float) -> None:
        self._work.clear()
        self._touched = False
        if self._beyond > 0:
            await self._jump()
        if self._must_renew or not self.connected:
            if not await self._lease.renew():
                await self._reacquire()
            self._must_renew = False
            if self._renewal is not None:
                self._renewal.cancel()
            self._renewal = self._loop.call_at(began + self._schedule.renew_s, self._let_renew)
        await self.flush()
        if not self.connected:
            _log.info("redis_connected", epoch=self._lease.epoch)
        self.connected = True
        self.problem = self._kind = ""
        self._backoff_s = 0.0

    async def _write(self) -> None:
        journal = self._journal
        if journal.needs_snapshot:
            changes = self._sources.snapshot()
            journal.snapshot_taken()
        else:
            changes = journal.take()
        try:
            await self._store.apply(self._lease, changes)
        except StaleEpoch:
            journal.put_back(changes)
            await self._reacquire()
        except StoreBehind as behind:
            _log.warning("redis_behind", epoch=self._lease.epoch, why=behind.why)
            journal.require_snapshot()
            self._work.set()
        except BaseException:
            journal.put_back(changes)
            raise

    async def _reacquire(self) -> None:
        """Takes an expired lease again, unless anybody has led since it was ours."""
        before = max(self._lease.epoch, self._beyond)
        if not await self._lease.try_acquire(self._beyond):
            raise StaleEpoch(f"another scheduler leads; epoch {before} is over")
        if not self._lease.follows(before):
            await self._lease.release()
            raise StaleEpoch(f"another scheduler led since epoch {before}")
        self._beyond = 0
        self._journal.require_snapshot()
        self._work.set()
        _log.warning("lease_reacquired", epoch=self._lease.epoch)
        self._sources.epoch_raised(self._lease.epoch)

    async def _jump(self) -> None:
        if not await self._lease.renew():
            self._beyond = 0  # a real successor: the lease is lost as usual
            return await self._reacquire()
        await self._lease.release()
        return await self._reacquire()

    async def _back_off(self, failure: BaseException) -> None:
        kind, self.problem = problem_of(failure)
        if kind != self._kind:  # logged once per kind: an outage may last long
            _log.warning("redis_lost", reason=kind, error=self.problem)
        self._kind = kind
        self.connected = False
        self._sources.failed(kind)
        self._sources.collect()  # keeps the dispatcher's own list short
        self._backoff_s = min(self._schedule.longest_backoff_s, max(0.02, self._backoff_s * 2))
        await asyncio.sleep(self._backoff_s)
        self._work.set()
