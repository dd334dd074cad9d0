"""The part of a scheduler process for one group: it stands by, leads, and stands by again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from catenary_scheduler.leadership.group_election import GroupElection
from catenary_scheduler.leadership.leader import LeaderContext, LeaderRuntime
from catenary_scheduler.leadership.takeover_backoff import StaleLeaseDetector, TakeoverBackoff
from catenary_scheduler.leadership.takeover_failures import TakeoverFailures
from catenary_scheduler.runtime.periodic import show_nothing
from catenary_scheduler.storage.keys import RedisKeys
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.script import pass_cancellation
from catenary_scheduler.storage.store import Store
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    ModelNotFound,
    StaleEpoch,
    Unavailable,
)
from catenary_services.log import get_logger
from catenary_services.redis.redis_client import problem_of

_log = get_logger(__name__)
_PAUSE_S = 0.2
_AFTER_EXPIRY_S = 0.005
_LEADER_RETURNS_S = 1.25
"""A leader that lost Redis tries to reach it at least this often. This is a little more than
`FlushSchedule.longest_backoff_s`."""
REDIS_FAILURES = (RedisError, OSError, TimeoutError)
_OWN_SETTINGS = (InvalidInput, ModelNotFound)
"""Errors that a wrong plan file raises."""


class GroupLeader:
    """Leads one group whenever it may, with a new `LeaderRuntime` each time.

    Attributes:
        group: Number of the group.
        contacted: Set once Redis told who leads the group, or a term began or failed.
        takeover_failures: The failures in a row of this process to lead the group.
    """

    def __init__(
        self,
        context: LeaderContext,
        redis: Redis,
        election: GroupElection,
        changed: Callable[[], None],
    ) -> None:
        """Makes a group leader without I/O; `changed` is called whenever a term begins or ends."""
        settings = context.settings
        keys = RedisKeys(settings.cluster, context.group, election.groups)
        self.group = context.group
        self.contacted = asyncio.Event()
        self._context = context
        self._election = election
        self._changed = changed
        self._name = settings.scheduler_id
        self._lease_s = settings.lease_s
        self._lease = Lease(
            redis, keys, election.token, settings.lease_s, context.metrics.repaired_epochs.inc
        )
        spoiled = context.metrics.quarantined_records
        self._store = Store(redis, keys, lambda: spoiled.labels("key").inc())
        self.takeover_failures = TakeoverFailures()
        self._backoff = TakeoverBackoff(_LEADER_RETURNS_S)
        self._stale_lease = StaleLeaseDetector(settings.lease_s)
        self._problem = ""
        self._leader: LeaderRuntime | None = None
        self._leading: asyncio.Task[None] | None = None

    @property
    def leader(self) -> LeaderRuntime | None:
        """The present leader; None while another process leads the group, or none does."""
        return self._leader

    @property
    def task(self) -> asyncio.Task[None]:
        """The task that stands by and leads; it ends only with an error, or when cancelled."""
        assert self._leading is not None
        return self._leading

    def start(self) -> None:
        """Starts the task that stands by for the lease and leads with it."""
        self._context.metrics.leader.set(0)
        self._leading = asyncio.create_task(self._lead_for_ever(), name=f"lead-{self.group}")

    async def resign(self) -> None:
        """Ends for good, writes all state, and gives the lease back.

        Raises:
            CatenaryError: The lease is not ours any more.
            RedisError: Redis does not answer; OSError and TimeoutError mean the same.
        """
        leader = self._leader
        await self.end()
        if leader is not None:
            await leader.write_behind.flush()
            await self._lease.release()

    async def end(self) -> None:
        """Ends for good and keeps the lease: others can lead only once it expires. Idempotent."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            self._leading = None

    # ---- standing by ----

    async def _lead_for_ever(self) -> None:
        while True:
            try:
                wait_s = await self._try()
                if not self._backoff.is_waiting:
                    self._problem = ""
                if wait_s > 0:
                    self.contacted.set()
                    await asyncio.sleep(wait_s)
            except REDIS_FAILURES as failure:
                pass_cancellation()
                self._backoff.redis_lost()
                kind, text = problem_of(failure)
                if kind != self._problem:  # one line for each kind: an outage may last for hours
                    _log.warning("redis_lost", reason=kind, error=text, group=self.group)
                self._problem = kind
                await asyncio.sleep(_PAUSE_S)
            except Exception as failure:
                if isinstance(failure, _OWN_SETTINGS) and not self.contacted.is_set():
                    raise  # at start-up, a wrong plan file must be reported at once
                await self._survive(failure)

    async def _survive(self, failure: Exception) -> None:
        """Leaves the lease to others for a while after any failure to lead."""
        pause_s = self.takeover_failures.failed(failure, time.monotonic())
        _log.error(
            "leading_failed",
            group=self.group,
            failures=self.takeover_failures.failures,
            again_after_s=round(pause_s, 3),
            exc_info=failure,
        )
        self._context.metrics.takeover_failures.inc()
        self.contacted.set()
        with suppress(*REDIS_FAILURES):
            await self._lease.release()
        pass_cancellation()
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.0))

    async def _try(self) -> float:
        """Leads if that is possible, and returns the seconds to wait before the next attempt."""
        turn_s = self._lease_s / 4 * random.uniform(0.5, 1.0)
        if self._election.groups > 1:
            view = await self._lease.look()
            now_s = time.monotonic()
            self._election.saw(self.group, view, now_s)
            if view.holder:
                self.takeover_failures.another_leads(now_s)
                await self._break_if_stale(view.left_s)
                if self._election.wants(self.group):
                    await self._lease.want()
                return min(turn_s, view.left_s + _AFTER_EXPIRY_S)
            wait_s = self._election.wait_s(self.group, now_s)
            if wait_s > 0:
                return min(turn_s, wait_s)
        if not await self._may_take():
            # A killed leader does not renew: try at the moment its lease ends, not a turn later.
            left_s = self._lease.left_s
            if left_s > 0:
                self.takeover_failures.another_leads(time.monotonic())
            return min(turn_s, left_s + _AFTER_EXPIRY_S) if left_s > 0 else turn_s
        self._election.took(self.group)
        try:
            await self._lead()
        finally:
            self._election.led.discard(self.group)
        return 0.0

    async def _may_take(self) -> bool:
        """Tries to take the lease, unless the leader before an outage of Redis comes first.

        Returns:
            True if the lease is ours now.
        """
        backoff, now_s = self._backoff, time.monotonic()
        if self.contacted.is_set() and backoff.left_s(now_s) > 0:
            if await self._lease.is_held():
                backoff.is_settled()
            else:
                backoff.redis_back(time.monotonic())
            return False
        taken = await self._lease.try_acquire(unless_forgotten=not backoff.has_waited(now_s))
        if self._lease.is_forgotten and not taken:
            backoff.redis_forgot(now_s)
        else:
            backoff.is_settled()
        if not taken:
            await self._break_if_stale(self._lease.left_s)
        return taken

    async def _break_if_stale(self, left_s: float) -> None:
        if self._stale_lease.saw(left_s, time.monotonic()):
            _log.warning("stale_lease_broken", left_s=left_s, group=self.group)
            await self._lease.break_stale()

    # ---- leading ----

    async def _lead(self) -> None:
        leader = LeaderRuntime(self._context, self._lease, self._store)
        asked = False
        try:
            await self._begin(leader)
            _log.info("leading", epoch=self._lease.epoch, group=self.group)
            self._takes_leadership(leader)
            self.takeover_failures.began(time.monotonic())
            asked = await self._until_asked(leader)
            # Written before the streams end: the changes that their end causes must not reach the
            # successor.
            await leader.write_behind.flush()
        except StaleEpoch as error:
            _log.warning("leadership_lost", error=error.message, group=self.group)
            self.takeover_failures.ended(time.monotonic())
        finally:
            self._leaves_leadership(leader)
        if asked:
            await self._lease.release()
            self._election.gave(self.group, time.monotonic(), 2 * self._lease_s)
            _log.info("group_handed_over", group=self.group)

    async def _begin(self, leader: LeaderRuntime) -> None:
        """Lets a leader take over from its predecessor, and renews the lease meanwhile."""

        async def keep_lease() -> None:
            while True:
                await asyncio.sleep(self._lease_s / 4)
                await self._lease.renew()

        keeper = asyncio.create_task(keep_lease())
        try:
            await leader.begin(self.takeover_failures)
        except CatenaryError:
            await self._lease.release()  # with a wrong plan file: nobody must wait for us
            raise
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _until_asked(self, leader: LeaderRuntime) -> bool:
        """Runs a leader; returns True once another process is to lead, False if it just ends.

        Raises:
            StaleEpoch: This process no longer leads.
        """
        if self._election.groups == 1:
            await leader.run()
            return False
        running = asyncio.create_task(leader.run(), name=f"term-{self.group}")
        watching = asyncio.create_task(self._watch_for_requests(), name=f"requests-{self.group}")
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            watching.result()
            return True
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    async def _watch_for_requests(self) -> None:
        """Returns once a standby wants this group and we lead other groups, too."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                view = await self._lease.look()
            except REDIS_FAILURES:
                pass_cancellation()
                continue  # the write-behind task handles the outage
            if self._election.gives(self.group, view):
                # Before any await: of two requests at the same time only one may be granted.
                self._election.led.discard(self.group)
                return

    def _takes_leadership(self, leader: LeaderRuntime) -> None:
        self._leader = leader
        self._context.metrics.leader.set(1)
        self._context.metrics.epoch.set(self._lease.epoch)
        self._changed()
        self.contacted.set()

    def _leaves_leadership(self, leader: LeaderRuntime) -> None:
        self._leader = None
        self._context.metrics.leader.set(0)
        show_nothing(self._context.metrics)
        self._changed()
        leader.close(Unavailable(f"{self._name} does not lead any more"))
