"""What agents say they sent becomes rates of links: for the dispatcher, for operators, for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch.events import Event, MoveCostsMeasured
from catenary_scheduler.feedback.transfer_rates import TransferRates
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.observed.cache_rates import CacheRates
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.records import measurements_of
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import ChainHop
from catenary_services.telemetry.metrics import Metrics
from chain_harness import RING, plan_is_stored, serving
from scheduler_harness import LLM, MS, AgentScript, Crowd, crash, scheduler, until
from scheduling_cases.stored_tables import stored_of

Configured = Callable[..., SchedulerSettings]
A, B = AgentId("agent-0"), AgentId("agent-1")
MIB = 1 << 20


def sent(peer: str, size: int, sending_ns: int) -> scheduler_pb2.CachesSent:
    link = scheduler_pb2.CachesSent.Link(peer_id=peer, bytes=size, sending_ns=sending_ns)
    return scheduler_pb2.CachesSent(links=[link])


class Heard:
    """The rates, and what they tell."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kept = 0
        nothing: Any = None
        self.rates = TransferRates(CacheRates(), nothing, self._feed, self._keep, {})

    def _feed(self, event: Event, now: int) -> None:
        self.events.append(event)

    def _keep(self) -> None:
        self.kept += 1


def test_a_rate_is_told_and_written_when_it_has_changed_notably() -> None:
    heard = Heard()
    heard.rates.caches_sent(A, sent(B, MIB, 10 * MS))
    first = MoveCostsMeasured(links=((A, B, 100 * MIB),))
    assert (heard.events, heard.kept) == ([first], 1)
    heard.rates.caches_sent(A, sent(B, MIB, 10 * MS - 1))
    heard.rates.caches_sent(A, sent(B, 100, MS))  # a row or two
    heard.rates.caches_sent(A, scheduler_pb2.CachesSent())
    assert (heard.events, heard.kept) == ([first], 1)
    for _ in range(3):
        heard.rates.caches_sent(A, sent(B, MIB, 20 * MS))
    assert heard.events[1:] == [MoveCostsMeasured(links=((A, B, 50 * MIB),))]


def test_rates_outlive_the_scheduler() -> None:
    before = MeasuredProfiles()
    before.cache_rates.observe((A, B), MIB, 10 * MS)
    odd = {"link|x|y": "0", "link|x": "5", "link|b|a": "fast", "odd": "1"}
    again = MeasuredProfiles()
    again.restore(measurements_of(stored_of(RedisTable.MEASURED, {**before.records(), **odd})))
    assert list(again.cache_rates.rates()) == [(A, B, 100 * MIB)]
    assert again.records() == before.records()
    assert again.cache_rates.observe((A, B), MIB, 20 * MS) == 50 * MIB  # the first news counts


def migration_budget(leader: LeaderRuntime) -> Any:
    return leader.dispatcher.chained._table.migration_budget


async def test_the_dispatcher_knows_links_and_caches_also_after_a_restart(
    generating: Configured, crowd: Crowd, tmp_path: Any
) -> None:
    settings = generating(plan=RING)
    async with scheduler(settings) as old:
        _, agents = await serving(old, crowd, AgentScript(), AgentScript())
        leader = old.leader()
        (chain,) = leader.cluster.active.plan.models[0].chains  # type: ignore[union-attr]
        assert migration_budget(leader).rate("agent-0>agent-1") == 10**9  # as they say
        decoder = leader.deployments.ready[LLM].decoder
        assert decoder is not None
        hop = chain.hops[0]
        there = ChainHop(B, hop.partition, hop.first_block, hop.last_block)
        cost = migration_budget(leader).cost([hop], [there], 7)
        assert cost.cache_bytes == 7 * hop.blocks * decoder.cache_bytes_per_token
        await agents[0].send(scheduler_pb2.AgentMessage(caches_sent=sent(B, MIB, 10 * MS)))
        await until(
            lambda: migration_budget(leader).rate("agent-0>agent-1") == 100 * MIB, "measured"
        )
        metrics = Metrics()
        leader.transfer_rates.export(metrics)
        link: dict[str, str] = {"source": A, "target": B}
        shown = metrics.registry.get_sample_value
        assert shown("catenary_link_bytes_per_second", link) == 100 * MIB
        assert shown("catenary_link_utilisation_ratio", link) is not None
        await plan_is_stored(old)
        await crash(old)
    async with scheduler(generating(scheduler_id="scheduler-1")) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        await serving(new, crowd, AgentScript(), AgentScript())
        assert migration_budget(new.leader()).rate("agent-0>agent-1") == 100 * MIB


def test_shares_of_links_and_chains_can_be_set() -> None:
    config = SchedulerSettings(move_link_share=0.25, move_slowdown=0.5).dispatching_sessions()
    assert (config.migration_budget.link_share, config.migration_budget.slowdown) == (0.25, 0.5)
