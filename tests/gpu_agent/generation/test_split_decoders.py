"""The split phase with real decoders: every cut gives the tokens of a ring that does both."""

from __future__ import annotations

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_agent.generation.context import CacheLimits
from catenary_services.domain.ids import PartitionKey
from tests.support.ring_harness import opening
from tiny_language_models import LAYERS, imported_llama

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

CUTS = {
    "1 to 1": ([(0, 6)], [(0, 6)]),
    "2 to 1": ([(0, 2), (2, 6)], [(0, 6)]),
    "1 to 2": ([(0, 6)], [(0, 4), (4, 6)]),
    "2 to 3": ([(0, 3), (3, 6)], [(0, 1), (1, 4), (4, 6)]),
}
PROMPTS = {n: [(7 * n + 3 * i * i) % 150 + 3 for i in range(4 + 11 * n)] for n in range(1, 5)}
WAYS = {
    1: {},
    2: {"temperature": 0.9, "seed": 7},
    3: {"temperature": 0.8, "seed": 8, "top_k": 20, "repetition_penalty": 1.4},
    4: {"frequency_penalty": 1.5, "presence_penalty": 0.7},  # the first token counts, too
}
TOKENS = 8


def load(library: str, first: int, last: int):
    repository, key, _ = imported_llama()
    layout = CacheLayout(8 * (last - first), 96, (first,))
    key = PartitionKey(key, first, last)
    return load_decoder(repository, key, Device("cpu"), layout, library=library)


async def answers(rings, caller, first: int, ring, decode=()) -> list[list[int]]:
    model = imported_llama()[1]
    for n, prompt in PROMPTS.items():
        made = opening(ring, prompt, max_tokens=TOKENS, model=model, decode=decode, **WAYS[n])
        await caller.open(first + n, made)
    return [await caller.finished(first + n, 30) for n in PROMPTS]


@pytest.mark.parametrize(
    "libraries",
    [
        ("torch", "onnx"),
        pytest.param(("onnx", "onnx"), marks=pytest.mark.system),
        pytest.param(("torch", "torch"), marks=pytest.mark.system),
    ],
)
async def test_every_cut_gives_the_tokens_of_a_ring_that_does_both(rings, libraries):
    assert LAYERS == 6
    caller = await rings.caller()
    await rings.agent("whole", load(libraries[1], 0, 6), chunk=16)
    expected = await answers(rings, caller, 0, [("whole", 0, 6)])
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    caches = CacheLimits(frame_bytes=4000)
    for number, (prefill, decode) in enumerate(CUTS.values(), start=1):
        spans = []
        for name, library, cuts in zip("pd", libraries, (prefill, decode), strict=True):
            spans.append([(f"{name}{number}-{i}", *cut) for i, cut in enumerate(cuts)])
            for agent, first, last in spans[-1]:
                await rings.agent(agent, load(library, first, last), chunk=16, caches=caches)
        assert await answers(rings, caller, 10 * number, *spans) == expected
        for agent, _, _ in spans[1][1:-1]:
            rings.nodes[agent].generation.close_sessions([10 * number + n for n in PROMPTS])
    await rings.all_free()
