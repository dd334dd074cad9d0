"""More slots than memory: the youngest sessions give way, the others never notice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.cache.slot_book import SlotBook
from catenary_agent.generation.loop.loading import DecoderLoader
from catenary_agent.generation.loop.table import cache_bytes
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.reporting import generation_report
from catenary_agent.kv import CacheSpan
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import CacheFull, InvalidInput
from tests.support.ring_harness import BLOCKS, TABLE, ToyDecoder, opening, toy, undisturbed

PROMPT = [(7 * i * i + 5 * i + 3) % 48 for i in range(20)]


def limited(tokens: int, first: int = 0, last: int = BLOCKS) -> ToyDecoder:
    """Returns a partition with memory for `tokens` of every block."""
    decoder = toy(first, last)
    decoder.book.layout = replace(decoder.layout, cache_tokens=tokens * (last - first))
    return decoder


def failures(*nodes) -> dict[int, str]:
    return {
        failed.session_id: failed.failure.reason
        for node in nodes
        for failed in node.told.of("session_failed")
    }


def watched(decoder: ToyDecoder) -> list[int]:
    """Returns what the partition holds behind every step, as it goes on."""
    held: list[int] = []
    real = decoder.step

    def step(items):
        made = real(items)
        held.append(decoder.cached_block_tokens)
        return made

    decoder.step = step
    return held


async def test_the_youngest_gives_way_and_the_oldest_goes_on(rings):
    caller = await rings.caller()
    decoder = limited(96)
    held = watched(decoder)
    node = await rings.agent("a-0", decoder)
    for session in (1, 2, 3):  # 32 each; the three of them would be 48 each
        await caller.open(session, opening([("a-0", 0, BLOCKS)], PROMPT, max_tokens=25))
    assert await caller.finished(1) == undisturbed(PROMPT, 25)
    assert await caller.finished(2) == undisturbed(PROMPT, 25)
    await node.settled()
    assert failures(node) == {3: CacheFull.reason}
    assert max(held) <= 96 * BLOCKS
    (failed,) = node.told.of("session_failed")
    assert failed.failure.retryable
    await rings.all_free()


async def test_what_gave_way_goes_on_from_its_history(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", limited(64))
    ring = [("a-0", 0, BLOCKS)]
    for session in (1, 2):
        await caller.open(session, opening(ring, PROMPT, max_tokens=25))
    assert await caller.finished(1) == undisturbed(PROMPT, 25)
    await node.settled()
    assert failures(node) == {2: CacheFull.reason}
    got = [token.token_id for token in caller.tokens[2]]
    again = opening(ring, [*PROMPT, *got], prompt_tokens=len(PROMPT), max_tokens=25)
    await caller.open(3, again)
    assert [*got, *await caller.finished(3)] == undisturbed(PROMPT, 25)


async def test_a_session_alone_may_be_as_long_as_it_was_admitted_for(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", limited(32))
    await caller.open(1, opening([("a-0", 0, BLOCKS)], PROMPT, max_tokens=30))
    assert await caller.finished(1) == undisturbed(PROMPT, 30)
    assert failures(node) == {}


async def test_the_agents_of_a_ring_agree_on_who_gives_way(rings):
    caller = await rings.caller()
    ring = [("a-0", 0, 2), ("a-1", 2, BLOCKS)]
    decoders = [limited(96, 0, 2), limited(96, 2)]
    held = [watched(decoder) for decoder in decoders]
    nodes = [await rings.agent(f"a-{i}", decoder, chunk=8) for i, decoder in enumerate(decoders)]
    for session in (1, 2, 3):
        await caller.open(session, opening(ring, PROMPT, max_tokens=25))
    for session in (1, 2):
        assert await caller.finished(session) == undisturbed(PROMPT, 25)
    for node in nodes:
        await node.settled()
        node.generation.close_sessions([1, 2, 3])
    assert set(failures(*nodes)) == {3}
    assert set(failures(*nodes).values()) == {CacheFull.reason}
    for each, decoder in zip(held, decoders, strict=True):
        assert max(each) <= decoder.layout.cache_tokens
    await rings.all_free()


async def test_what_came_for_a_session_that_gave_way_is_given_back(rings):
    caller = await rings.caller()
    ring = [("a-0", 0, 2), ("a-1", 2, BLOCKS)]
    nodes = [
        await rings.agent("a-0", toy(0, 2), chunk=8),
        await rings.agent("a-1", limited(64, 2), chunk=8),
    ]
    for session in range(1, 7):
        await caller.open(session, opening(ring, PROMPT, max_tokens=12))
    assert await caller.finished(1) == undisturbed(PROMPT, 12)
    async with asyncio.timeout(30):
        while (
            len(failures(*nodes))
            + sum(bool(got and got[-1].finish_reason) for got in caller.tokens.values())
            < 6
        ):
            await asyncio.sleep(0.01)
    for node in nodes:
        await node.settled()
        node.generation.close_sessions(range(1, 7))
    await rings.all_free()  # slots, and bytes of rows that waited


async def test_a_session_that_moves_in_gives_way_before_those_that_are_there(rings):
    caller = await rings.caller()
    source, target = toy(), limited(64)
    nodes = [await rings.agent("a-0", source), await rings.agent("a-1", target)]
    source.takes_s = target.takes_s = 0.005
    await caller.open(1, opening([("a-1", 0, BLOCKS)], PROMPT, max_tokens=40))
    await caller.open(2, opening([("a-0", 0, BLOCKS)], PROMPT, max_tokens=40))
    await caller.wait_for(1, 13)
    await caller.wait_for(2, 13)
    await caller.move(2, 3, [("a-1", 0, BLOCKS)])  # 48 are there, 48 would come
    assert await caller.finished(1) == undisturbed(PROMPT, 40)
    assert await caller.finished(2) == undisturbed(PROMPT, 40)
    assert failures(nodes[1]) == {3: CacheFull.reason}


def test_what_is_cached_is_told() -> None:
    decoder = limited(96)
    decoder.open_session(1, 0)
    decoder.book.cached[1] = 17

    told = generation_report(PartitionBatcher(decoder), 1).message()
    assert told.generation_report.cached_block_tokens == 32 * BLOCKS


def test_caches_count_in_whole_blocks_of_sixteen_tokens() -> None:
    book = SlotBook(toy().key, TABLE, CacheLayout(600, 512, (0, 4)))
    book.open(1, 0, 0)
    book.open(2, 4, 0)
    assert book.cached_block_tokens == 0
    book.cached.update({1: 1, 2: 33})
    assert (book.block_tokens(1), book.block_tokens(2)) == (16 * BLOCKS, 48 * (BLOCKS - 4))
    assert book.cached_block_tokens == 16 * BLOCKS + 48 * (BLOCKS - 4)
    assert book.block_tokens(1, 16) == 16 * BLOCKS
    assert book.block_tokens(1, 17) == 32 * BLOCKS
    book.imported(1, CacheSpan(0, 1, 1, 20))
    assert book.block_tokens(1) == 32 * BLOCKS
    assert book.block_tokens(3, 50) == 0


def test_memory_is_what_may_be_cached_and_without_a_limit_what_fills_all_slots() -> None:
    layout = CacheLayout(64, 512, (0,), 4_096)
    assert layout.memory_tokens == 4_096
    assert CacheLayout(64, 512, (0,)).memory_tokens == 64 * 512

    assert cache_bytes(PartitionBatcher(toy()), layout) == TABLE.slot_bytes(4_096)
    with pytest.raises(InvalidInput, match="cache_tokens"):
        CacheLayout(64, 512, (0,), -1).check(toy().key)


def test_an_order_says_what_may_be_cached() -> None:
    decoder = limited(96)

    class Loaded:
        key = decoder.key
        layout = decoder.layout
        content = ""

    cache = scheduler_pb2.CacheLayout(
        block_slots=600, session_tokens=512, entry_blocks=[0], cache_tokens=96 * BLOCKS
    )
    order = scheduler_pb2.LoadPartition(cache=cache)
    assert DecoderLoader.is_as_ordered(Loaded(), order)  # type: ignore[arg-type]
    cache.cache_tokens += 1
    changed = scheduler_pb2.LoadPartition(cache=cache)
    assert not DecoderLoader.is_as_ordered(Loaded(), changed)  # type: ignore[arg-type]
