"""Random histories of messages: what is only under way is never mended, what leaked always is."""

from __future__ import annotations

import multiprocessing
import os
import random

import pytest

import figures
from catenary_scheduler.book import Reservation
from catenary_scheduler.book.caches import cache_of
from catenary_services.domain.ids import AgentId, BatchId, RequestId, ResourceId, SessionId
from catenary_services.domain.plan import ChainHop
from scheduling_cases.audit_world import (
    AGENTS,
    ANSWER_TIMEOUT_MS,
    CHAINS,
    INTERVAL_MS,
    MS,
    STREAM_MS,
    World,
)

SMALL = 60
LARGE = int(os.environ.get("CATENARY_AUDIT_HISTORIES", "100000"))
BUSY_MS = 9_000
CLAIM_MS = 6_000
TWO_AUDITS_MS = 2 * INTERVAL_MS + ANSWER_TIMEOUT_MS + 3_000
"""With the time that orders take."""
LOSABLE = (
    "StartSession",
    "DispatchBatch",
    "CloseSessions",
    "CancelBatch",
    "SessionRequested",
    "RequestCompleted",
    "RequestCancelled",
    "SessionsClosed",
    "SessionMoved",
    "SessionFailed",
    "opening",
    "move",
    "round",
    "rows",
    "result",
    "token",
)
"""Whatever one message or frame of these kinds is, losing it must not leave anything behind."""


def busy(world: World, until_ms: float) -> None:
    """Lets clients come and go, and sessions move."""
    chance = world.random

    def something() -> None:
        if world.now >= until_ms * MS:
            return
        world.after(chance.expovariate(1 / 700), something)
        what = chance.random()
        gateway = chance.choice(list(world.gateways))
        if what < 0.4:
            world.generate(gateway, chance.choice((chance.randint(1, 30), 100)))
        elif what < 0.65:
            world.infer(gateway)
        elif what < 0.75:
            storm(world)
        elif what < 0.85:
            world.moved()
        elif world.gateways[gateway]:
            number = chance.choice(list(world.gateways[gateway]))
            world.cancel(RequestId(gateway, number))

    something()
    world.run(until_ms)


def storm(world: World) -> None:
    """Many come at once, so that gateways share batches, and half of them go again soon."""
    chance = world.random
    for _ in range(chance.randint(2, 6)):
        gateway = chance.choice(list(world.gateways))
        request = world.infer(gateway) if chance.random() < 0.8 else world.generate(gateway, 20)
        if chance.random() < 0.5:
            world.after(chance.random() * 2 * STREAM_MS, world.cancel, request)


def nothing_is_mended(seed: int) -> World:
    world = World(seed)
    busy(world, BUSY_MS)
    world.calm()
    world.run(BUSY_MS + 12_000)
    assert not world.leaks, (seed, world.leaks)
    assert not world.left_over(), (seed, world.left_over())
    return world


def everything_is_mended(seed: int) -> World:
    """One loss, of anything; two audits later the book is true again."""
    world = World(seed)
    chance = random.Random(seed)
    kind, skip = chance.choice(LOSABLE), chance.randrange(6)
    lost: list[int] = []

    def loses(what: str) -> bool:
        nonlocal skip
        if lost or what != kind:
            return False
        skip -= 1
        if skip >= 0:
            return False
        lost.append(world.now)
        return True

    world.loses = loses
    busy(world, BUSY_MS)
    end_ms = BUSY_MS
    claim_ms = CLAIM_MS if inject(world, chance) else 0
    if chance.random() < 0.5:  # clients wait on: what is lost is begun again
        end_ms += TWO_AUDITS_MS
        world.run(end_ms)
    world.calm()
    world.run(end_ms + TWO_AUDITS_MS + claim_ms)
    if lost and lost[0] > end_ms * MS:  # what was to mend it: two audits count from there
        world.run(lost[0] / MS + TWO_AUDITS_MS + claim_ms)
    assert not world.left_over(), (seed, kind, world.left_over(), world.leaks)
    return world


def inject(world: World, chance: random.Random) -> bool:
    """Lets an agent forget or invent something, or the book remember what never was.

    Returns:
        True if it is of a session that a gateway might still claim: that is waited for.
    """
    what, agent = chance.randrange(6), world.agents[chance.choice(AGENTS)]
    if what == 0:
        holders = [each for each in world.agents.values() if each.sessions]
        if holders:
            forgetful = chance.choice(holders)
            del forgetful.sessions[chance.choice(list(forgetful.sessions))]
    elif what == 1:
        theirs, ours = SessionId(7), SessionId(5_000)
        session = chance.choice((theirs, ours))
        agent.sessions[session] = (hop_of(agent.name),)
        return session == theirs
    elif what == 2:
        agent.batches[BatchId(chance.choice((3, 9_999)))] = 0
    elif what == 3:
        world.in_flight[BatchId(8_888)] = 0
    elif what == 4:
        world.open.add(RequestId(next(iter(world.gateways)), 4_444))
    elif what == 5:
        far = world.now + 10**15
        resource = ResourceId(f"gpu/{agent.name}")
        stale = Reservation(BatchId(77), 0, resource, world.now, world.now + MS, far)
        slots = Reservation(
            BatchId(0),
            0,
            cache_of(agent.name, hop_of(agent.name).partition),
            0,
            far,
            far,
            slots=2,
            session=SessionId(66),
        )
        world.dispatcher.restore([stale, slots])
    return False


def hop_of(agent: AgentId) -> ChainHop:
    return next(hop for chain in CHAINS for hop in chain.hops if hop.agent == agent)


def test_messages_under_way_are_no_leaks() -> None:
    audits = sum(nothing_is_mended(seed).auditor.audits for seed in range(SMALL))
    assert audits >= 4 * SMALL


def test_whatever_is_lost_is_mended_within_two_audits() -> None:
    found = {leak.kind for seed in range(SMALL) for _, leak in everything_is_mended(seed).leaks}
    assert len(found) >= 6


def both(seed: int) -> int:
    return nothing_is_mended(seed).auditor.audits + everything_is_mended(seed).auditor.audits


@pytest.mark.system
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_histories() -> None:
    seeds = range(10**6, 10**6 + LARGE // 2)
    with multiprocessing.get_context("fork").Pool() as pool:
        audits = sum(pool.imap_unordered(both, seeds, chunksize=200))
    report = f"{2 * len(seeds)} histories"
    figures.report("audit histories", f"{report}, audits", float(audits))
    figures.report("audit histories", "live work ended, or leaks left", 0.0, "", "0")
    assert audits >= 8 * len(seeds)
