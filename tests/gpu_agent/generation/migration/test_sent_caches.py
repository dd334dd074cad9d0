"""The scheduler hears how many bytes of caches left for whom, and how long that took."""

from __future__ import annotations

from catenary_agent.generation.frames.sent_caches import SentCacheReporter
from shared_helpers.waiting import until
from tests.support.ring_harness import opening, toy, undisturbed

PROMPT = [(7 * i * i + 5 * i + 3) % 48 for i in range(37)]


async def test_caches_that_left_are_told_by_peer(rings):
    caller = await rings.caller()
    prefill, decode = [("p-0", 0, 6)], [("d-0", 0, 2), ("d-1", 2, 6)]
    nodes = {agent: await rings.agent(agent, toy(*cut)) for agent, *cut in (*prefill, *decode)}
    await caller.open(1, opening(prefill, PROMPT, max_tokens=5, decode=decode))
    assert await caller.finished(1) == undisturbed(PROMPT, 5)
    told = nodes["p-0"].told
    await until(lambda: told.of("caches_sent"))
    sent: dict[str, tuple[int, int]] = {}
    for message in told.of("caches_sent"):
        for link in message.links:
            nbytes, sending_ns = sent.get(link.peer_id, (0, 0))
            sent[link.peer_id] = nbytes + link.bytes, sending_ns + link.sending_ns
    token = nodes["p-0"].decoders[0].table.cache_bytes_per_token
    assert {peer: nbytes for peer, (nbytes, _) in sent.items()} == {
        "d-0": 2 * len(PROMPT) * token,
        "d-1": 4 * len(PROMPT) * token,
    }
    assert all(sending_ns > 0 for _, sending_ns in sent.values())
    assert nodes["d-0"].told.of("caches_sent") == []


async def test_frames_of_a_while_are_one_message():
    told = []
    sent = SentCacheReporter(told.append, report_s=0.01)
    sent.add("a", 5, 7)
    sent.add("b", 1, 2)
    sent.add("a", 6, 8)
    await until(lambda: told)
    (message,) = [each.message().caches_sent for each in told]
    assert [(each.peer_id, each.bytes, each.sending_ns) for each in message.links] == [
        ("a", 11, 15),
        ("b", 1, 2),
    ]
    sent.add("a", 9, 9)
    await until(lambda: len(told) == 2)
    assert [each.bytes for each in told[1].message().caches_sent.links] == [9]


async def test_nothing_is_told_after_the_end():
    told = []
    sent = SentCacheReporter(told.append, report_s=0.0)
    sent.add("a", 5, 7)
    sent.close()
    sent.close()
    again = SentCacheReporter(
        told.append, report_s=0.0
    )  # its timer comes after the one that was stopped
    again.add("b", 1, 1)
    await until(lambda: told)
    assert [link.peer_id for each in told for link in each.message().caches_sent.links] == ["b"]
