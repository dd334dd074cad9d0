"""Texts begun while nothing gets from one agent of their chain to the other, in one direction.

Everybody is there and ready and every connection is open: only what is sent one way is never
acknowledged. Texts come from emulated agents over the chain of agents 0 and 1, and where a test
says so also from agent 2 alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import catenary
import figures
from fault_cluster import LEASE_S, TEXTS, nothing_is_booked
from machine_faults.namespaces import VirtualNetwork, virtual_network
from machine_faults.text_cluster import GATEWAY, SCHEDULER, texts_over

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

AGENTS = ("agent-0", "agent-1", "agent-2")
LEASES = {"scheduler": {"lease_s": LEASE_S}}
OVER_BOTH = {
    "capacity": 12,
    "hops": [{"agent": "agent-0", "blocks": [0, 3]}, {"agent": "agent-1", "blocks": [3, 6]}],
}
ELSEWHERE = {"capacity": 4, "hops": [{"agent": "agent-2", "blocks": [0, 6]}]}
AT_ONCE = 5
"""More than the other chain takes, so that some begin on the one with the cut."""
TOKENS = 24
PROMISED_S = 8.0
DEADLINE_S = 30.0
TOLD_S = DEADLINE_S - 1.0


@pytest.fixture
def network() -> Iterator[VirtualNetwork]:
    with virtual_network([SCHEDULER, GATEWAY, *AGENTS]) as made:
        yield made


async def tell(client: catenary.AsyncClient, number: int) -> tuple[tuple[int, ...], float]:
    """Returns a text's tokens, and the longest wait for one of them, the first included."""
    last_s, longest_s = time.monotonic(), 0.0
    stream = client.generate(
        TEXTS,
        f"once upon a time {number}",
        stream=True,
        max_tokens=TOKENS,
        ignore_eos=True,
        temperature=0.0,
        timeout_s=DEADLINE_S,
    )
    async for _ in stream:
        now_s = time.monotonic()
        last_s, longest_s = now_s, max(longest_s, now_s - last_s)
    return stream.so_far.token_ids, longest_s


async def tell_some(client: catenary.AsyncClient) -> list[tuple[tuple[int, ...], float]]:
    return await asyncio.gather(*(tell(client, number) for number in range(AT_ONCE)))


@pytest.mark.parametrize("source", ["agent-0", "agent-1"], ids=["rows", "tokens"])
async def test_texts_begun_over_a_cut_link_come_over_another_chain(
    tmp_path: Path, network: VirtualNetwork, source: str
) -> None:
    target = "agent-1" if source == "agent-0" else "agent-0"
    async with (
        texts_over([OVER_BOTH, ELSEWHERE], tmp_path, network, overrides=LEASES) as cluster,
        cluster.client() as client,
    ):
        undisturbed = await tell_some(client)
        network.cut([source], [target], one_way=True)
        first = asyncio.create_task(tell_some(client))
        # Nothing is acknowledged any more, so that nothing of these is even sent.
        await asyncio.sleep(1.0)
        behind = await tell_some(client)
        disturbed = [*await first, *behind]
        again = await tell_some(client)
        network.heal()
        await nothing_is_booked(client)
    test = f"cut one way, {source} to {target}"
    longest_s = max(pause_s for _, pause_s in disturbed)
    figures.report(test, "longest wait for a token", longest_s, "s", f"<= {PROMISED_S:g}")
    known_s = max(pause_s for _, pause_s in again)
    figures.report(test, "once it is known", known_s, "s", f"<= {PROMISED_S:g}")
    wanted = [ids for ids, _ in undisturbed]
    assert [ids for ids, _ in disturbed] == 2 * wanted
    assert [ids for ids, _ in again] == wanted
    # It is noticed only when nothing was acknowledged for a while: some did begin over the cut.
    assert 2.0 < longest_s <= PROMISED_S
    assert known_s <= PROMISED_S


async def test_a_text_whose_only_chain_is_cut_is_told_so_before_its_deadline(
    tmp_path: Path, network: VirtualNetwork
) -> None:
    async with (
        texts_over([OVER_BOTH], tmp_path, network, overrides=LEASES) as cluster,
        cluster.client() as client,
    ):
        tokens, _ = await tell(client, 0)
        network.cut(["agent-0"], ["agent-1"], one_way=True)
        began_s = time.monotonic()
        with pytest.raises(catenary.CatenaryError) as failed:
            await tell(client, 0)
        told_s = time.monotonic() - began_s
        network.heal()
        figures.report("cut one way, no other chain", "told after", told_s, "s", f"<= {TOLD_S:g}")
        assert failed.value.reason in ("PARTITION_LOST", "UNAVAILABLE")
        assert failed.value.retryable
        assert told_s <= TOLD_S
        assert (await tell(client, 0))[0] == tokens
        await nothing_is_booked(client)
