"""Rings of the real model on ONNX Runtime: the same tokens as one executor stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from tests.support.language_model import KEY, shared_models
from tests.support.ring_harness import opening

pytestmark = pytest.mark.system

BLOCKS = 30
PROMPTS = {
    1: [1, 9690, 198, 2683, 359, 253, 5356, 30],
    2: [504, 3575, 282, 4649, 314],
    3: [788, 506, 253, 1838, 335, 253] * 7,
}
TOKENS = 8


def load(first: int, last: int, *entries: int):
    layout = CacheLayout(6 * (last - first), 128, (first, *entries))
    return load_decoder(shared_models(), PartitionKey(KEY, first, last), Device("cpu"), layout)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Greedy tokens of each prompt alone, the whole prompt in one step."""
    executor = load(0, BLOCKS)
    made = {}
    for session, prompt in PROMPTS.items():
        executor.open_session(session, 0)
        known, pending = list(prompt), list(prompt)
        while len(known) < len(prompt) + TOKENS:
            position = len(known) - len(pending)
            item = StepItem(session, position, np.array(pending, np.int64), "logits")
            [logits] = executor.step([item])
            assert logits is not None
            pending = [int(np.argmax(logits))]
            known += pending
        executor.close_session(session)
        made[session] = known[len(prompt) :]
    executor.close()
    return made


RINGS = {
    1: [("a-0", 0, 30)],
    2: [("a-0", 0, 13), ("a-1", 13, 30)],
    3: [("a-0", 0, 13), ("a-1", 13, 22), ("a-2", 22, 30)],
}


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_ring_of_the_real_model_says_what_one_executor_says(rings, expected, size):
    caller = await rings.caller()
    nodes = [
        await rings.agent(agent, load(first, last), chunk=16) for agent, first, last in RINGS[size]
    ]
    for session, prompt in PROMPTS.items():
        await caller.open(session, opening(RINGS[size], prompt, max_tokens=TOKENS, model=KEY))
    for session in PROMPTS:
        assert await caller.finished(session, 60) == expected[session]
    for node in nodes[1:-1]:
        node.generation.close_sessions(list(PROMPTS))
    await rings.all_free()


async def test_sessions_that_enter_the_real_model_in_the_middle_share_its_passes(rings, expected):
    caller = await rings.caller()
    for agent, first, last in (("a-0", 0, 13), ("a-1", 0, 22)):
        await rings.agent(agent, load(first, last))
    shared = await rings.agent("a-2", load(10, 30, 13, 22))
    chains = {
        1: [("a-0", 0, 13), ("a-2", 13, 30)],
        2: [("a-1", 0, 22), ("a-2", 22, 30)],
        3: [("a-0", 0, 13), ("a-2", 13, 30)],
    }
    for session, prompt in PROMPTS.items():
        made = opening(chains[session], prompt, max_tokens=TOKENS, model=KEY)
        await caller.open(session, made)
    for session in PROMPTS:
        assert await caller.finished(session, 60) == expected[session]
    assert shared.generation.block_slots == (0, 120)
    await rings.all_free()
