"""One group of a cluster at one scheduler process: stands by, leads it, stands by again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from catenary_scheduler.leadership.group_election import Campaign
from catenary_scheduler.leadership.leader import LeaderContext, LeaderRuntime
from catenary_scheduler.leadership.takeover_delay import Deference, FrozenLease
from catenary_scheduler.leadership.takeover_trouble import TakeoverTrouble
from catenary_scheduler.runtime.periodic import show_nothing
from catenary_scheduler.storage.keys import Keys
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
from catenary_services.redis_client import problem_of

_log = get_logger(__name__)
_PAUSE_S = 0.2
_AFTER_EXPIRY_S = 0.005
_LEADER_RETURNS_S = 1.25
"""A leader that lost Redis tries it again at least this often (`Rhythm.longest_backoff_s`, and a
little more)."""
REDIS_FAILURES = (RedisError, OSError, TimeoutError)
_OWN_SETTINGS = (InvalidInput, ModelNotFound)
"""Errors of a plan file."""


class Shard:
    """Leads one group whenever it may; a term each time.

    Attributes:
        group: Number of the group.
        contacted: Set once Redis said who leads it, or that we do.
        trouble: What kept this process from leading when it could have.
    """

    def __init__(
        self, context: LeaderContext, redis: Redis, campaign: Campaign, changed: Callable[[], None]
    ) -> None:
        """Opens nothing; `changed` is called whenever a term begins or ends."""
        settings = context.settings
        keys = Keys(settings.cluster, context.group, campaign.groups)
        self.group = context.group
        self.contacted = asyncio.Event()
        self._context = context
        self._campaign = campaign
        self._changed = changed
        self._name = settings.scheduler_id
        self._lease_s = settings.lease_s
        self._lease = Lease(
            redis, keys, campaign.token, settings.lease_s, context.metrics.spoiled_epochs.inc
        )
        spoiled = context.metrics.quarantined_records
        self._store = Store(redis, keys, lambda: spoiled.labels("key").inc())
        self.trouble = TakeoverTrouble()
        self._deference = Deference(_LEADER_RETURNS_S)
        self._frozen = FrozenLease(settings.lease_s)
        self._problem = ""
        self._term: LeaderRuntime | None = None
        self._leading: asyncio.Task[None] | None = None

    @property
    def term(self) -> LeaderRuntime | None:
        """The present term; None while somebody else leads, or nobody."""
        return self._term

    @property
    def task(self) -> asyncio.Task[None]:
        """Ends only with an error, or when it is told to."""
        assert self._leading is not None
        return self._leading

    def start(self) -> None:
        """Begins to campaign."""
        self._context.metrics.leader.set(0)
        self._leading = asyncio.create_task(self._lead_for_ever(), name=f"lead-{self.group}")

    async def resign(self) -> None:
        """Ends for good and gives the lease back with everything written.

        Raises:
            CatenaryError: the lease is not ours any more.
            RedisError: Redis does not answer; so do OSError and TimeoutError.
        """
        term = self._term
        await self.end()
        if term is not None:
            await term.write_behind.flush()
            await self._lease.release()

    async def end(self) -> None:
        """Ends for good; whoever wants to lead must wait until the lease is over. Idempotent."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            self._leading = None

    # ---- standing by ----

    async def _lead_for_ever(self) -> None:
        while True:
            try:
                wait_s = await self._try()
                if not self._deference.is_waiting:
                    self._problem = ""
                if wait_s > 0:
                    self.contacted.set()
                    await asyncio.sleep(wait_s)
            except REDIS_FAILURES as failure:
                pass_cancellation()
                self._deference.redis_lost()
                kind, text = problem_of(failure)
                if kind != self._problem:  # once for each: an outage may last for hours
                    _log.warning("redis_lost", reason=kind, error=text, group=self.group)
                self._problem = kind
                await asyncio.sleep(_PAUSE_S)
            except Exception as failure:
                if isinstance(failure, _OWN_SETTINGS) and not self.contacted.is_set():
                    raise  # whoever starts us with a wrong plan file is to hear of it at once
                await self._survive(failure)

    async def _survive(self, failure: Exception) -> None:
        """Leaves the lease to others for a while, whatever went wrong, and tries again."""
        pause_s = self.trouble.failed(failure, time.monotonic())
        _log.error(
            "leading_failed",
            group=self.group,
            failures=self.trouble.failures,
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
        """Leads if that is possible, and returns how long to wait before the next attempt."""
        turn_s = self._lease_s / 4 * random.uniform(0.5, 1.0)
        if self._campaign.groups > 1:
            sight = await self._lease.look()
            now_s = time.monotonic()
            self._campaign.saw(self.group, sight, now_s)
            if sight.holder:
                self.trouble.another_leads(now_s)
                await self._break_if_frozen(sight.left_s)
                if self._campaign.wants(self.group):
                    await self._lease.want()
                return min(turn_s, sight.left_s + _AFTER_EXPIRY_S)
            wait_s = self._campaign.wait_s(self.group, now_s)
            if wait_s > 0:
                return min(turn_s, wait_s)
        if not await self._may_take():
            # One who was killed does not renew: the moment it is over, not a turn later.
            left_s = self._lease.left_s
            if left_s > 0:
                self.trouble.another_leads(time.monotonic())
            return min(turn_s, left_s + _AFTER_EXPIRY_S) if left_s > 0 else turn_s
        self._campaign.took(self.group)
        try:
            await self._lead()
        finally:
            self._campaign.led.discard(self.group)
        return 0.0

    async def _may_take(self) -> bool:
        """Takes the lease if it is free and nobody has a better claim to it."""
        deference, now_s = self._deference, time.monotonic()
        if self.contacted.is_set() and deference.left_s(now_s) > 0:
            sight = await self._lease.look()
            if sight.holder:
                deference.is_settled()
            else:
                deference.redis_back(now_s)
            return False
        taken = await self._lease.try_acquire(unless_forgotten=not deference.has_waited(now_s))
        if self._lease.is_forgotten and not taken:
            deference.redis_forgot(now_s)
        else:
            deference.is_settled()
        if not taken:
            await self._break_if_frozen(self._lease.left_s)
        return taken

    async def _break_if_frozen(self, left_s: float) -> None:
        if self._frozen.saw(left_s, time.monotonic()):
            _log.warning("frozen_lease_broken", left_s=left_s, group=self.group)
            await self._lease.break_frozen()

    # ---- leading ----

    async def _lead(self) -> None:
        term = LeaderRuntime(self._context, self._lease, self._store)
        asked = False
        try:
            await self._begin(term)
            _log.info("leading", epoch=self._lease.epoch, group=self.group)
            self._takes_office(term)
            self.trouble.began(time.monotonic())
            asked = await self._until_asked(term)
            # Before the streams end: what that changes is not for the successor.
            await term.write_behind.flush()
        except StaleEpoch as error:
            _log.warning("leadership_lost", error=error.message, group=self.group)
            self.trouble.ended(time.monotonic())
        finally:
            self._leaves_office(term)
        if asked:
            await self._lease.release()
            self._campaign.gave(self.group, time.monotonic(), 2 * self._lease_s)
            _log.info("group_handed_over", group=self.group)

    async def _begin(self, term: LeaderRuntime) -> None:
        """Lets a term take over; the lease is kept meanwhile."""

        async def keep_lease() -> None:
            while True:
                await asyncio.sleep(self._lease_s / 4)
                await self._lease.renew()

        keeper = asyncio.create_task(keep_lease())
        try:
            await term.begin(self.trouble)
        except CatenaryError:
            await self._lease.release()  # a wrong plan file: nobody else must wait for us
            raise
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _until_asked(self, term: LeaderRuntime) -> bool:
        """Runs a term; True once another process is to lead instead of us.

        Raises:
            StaleEpoch: this process no longer leads.
        """
        if self._campaign.groups == 1:
            await term.run()
            return False
        running = asyncio.create_task(term.run(), name=f"term-{self.group}")
        watching = asyncio.create_task(self._watch_for_wishes(), name=f"wishes-{self.group}")
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

    async def _watch_for_wishes(self) -> None:
        """Returns once a standby wants this group, and we lead others too."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                sight = await self._lease.look()
            except REDIS_FAILURES:
                pass_cancellation()
                continue  # the write-behind task sees to that
            if self._campaign.gives(self.group, sight):
                # Before anything is awaited: of two wishes at a time only one may be granted.
                self._campaign.led.discard(self.group)
                return

    def _takes_office(self, term: LeaderRuntime) -> None:
        self._term = term
        self._context.metrics.leader.set(1)
        self._context.metrics.epoch.set(self._lease.epoch)
        self._changed()
        self.contacted.set()

    def _leaves_office(self, term: LeaderRuntime) -> None:
        self._term = None
        self._context.metrics.leader.set(0)
        show_nothing(self._context.metrics)
        self._changed()
        term.close(Unavailable(f"{self._name} does not lead any more"))
